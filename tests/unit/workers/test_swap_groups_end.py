"""Groups that are swapped out, when some of their sequences end, all are cancelled, or their worker
leaves. Blocks of 4."""

from dataclasses import replace

import pytest

from services.protocol.messages import Failed, Requeued
from services.worker.requests.events import EXPIRED

from .conftest import MakePair, counts_steps
from .fakes import asked, right
from .preempting import come_back, evict_all, finish, preempt, running, swapped_out


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


async def test_ended_sequences_are_not_copied(make_pair: MakePair) -> None:
    """1 ends with its fourth token; the others are preempted later."""
    pair = await make_pair(64, num_swap_blocks=32)
    back = await swapped_out(pair, asked(3, stop_token_ids=right(1)[3:4]))
    assert back.swapped is not None
    assert [table.index for table in back.swapped.tables] == [0, 2]
    issued = await come_back(pair, back)
    assert await finish(pair, issued) == {index: right(index) for index in (0, 2)}


async def test_a_request_that_ends_while_swapped_out_is_not_brought_back(
    make_pair: MakePair,
) -> None:
    """Its stop string was found late; the others return, and nothing of it stays."""
    pair = await make_pair(64, num_swap_blocks=32)
    back = await swapped_out(pair, asked(3))
    pair.decode.role.abort(pair.session, "r1", 1, 1)
    evict_all(pair)
    left = (back.sequences[0], back.sequences[2])
    num_copied = pair.arena.num_copied
    issued = await come_back(pair, replace(back, sequences=left))
    assert pair.arena.num_copied - num_copied == 2 + 2 * 3
    assert await finish(pair, issued) == {index: right(index) for index in (0, 2)}


@pytest.mark.parametrize("is_copied", [True, False])
async def test_a_cancelled_request_leaves_nothing(make_pair: MakePair, is_copied: bool) -> None:
    """At rest there, or while it is copied; also one by one."""
    pair = await make_pair(64, num_swap_blocks=32)
    assert pair.swap_pool is not None
    await running(pair, asked(3), 6)
    if is_copied:
        await preempt(pair)
    else:
        pair.swap_pool.copying.clear()
        pair.decode.role.preempt(["h-r1"])
        pair.decode_model.gate.set()
        await pair.until(lambda: pair.decode.role.load().num_running == 0)
    for index in (1, 0, 2):
        pair.decode.role.abort(pair.session, "r1", 1, index)
    pair.swap_pool.copying.set()
    await pair.until_empty()
    await pair.until_colder_is_empty()
    await pair.until(lambda: not len(pair.decode.role.jobs))
    assert len(pair.session.of(Requeued)) == is_copied
