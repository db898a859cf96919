"""Groups that are swapped out, when some of their sequences end, all are cancelled, or their worker
leaves. Blocks of 4."""

from services.protocol.messages import Failed
from services.worker.requests.events import EXPIRED

from .conftest import MakePair, counts_steps
from .preempting import asked, come_back, right, swapped_out


async def test_a_deadline_is_kept_while_it_is_swapped_out(make_pair: MakePair) -> None:
    pair = await make_pair(64, num_swap_blocks=32)
    await swapped_out(pair, asked(3))
    (job,) = pair.decode.role.jobs
    pair.decode.role.end(job, EXPIRED)
    await pair.until(lambda: bool(pair.session.of(Failed)))
    assert pair.session.of(Failed)[0].code == "deadline_exceeded"
    await pair.until_empty()
    await pair.until_colder_is_empty()


@counts_steps
async def test_a_worker_that_is_drained_waits_for_what_it_has_swapped_out(
    make_pair: MakePair,
) -> None:
    """Its gateway has it brought back elsewhere; then the worker can leave."""
    pair = await make_pair(64, num_swap_blocks=32)
    back = await swapped_out(pair, asked(3))
    assert pair.decode.drain() == 0
    issued = await come_back(pair, back)
    pair.decode.role.abort(pair.session, "r1", 1)  # as its gateway does, once it is back
    await pair.decode.drained()
    await pair.until_colder_is_empty()
    assert [state.token_ids for state in issued.sequences] == [right(i, 9) for i in range(3)]
