"""Groups that leave a worker with their block tables or without: moved, preempted, parked."""

from dataclasses import replace

from services.protocol.messages import Requeued, RequeueReason, Resume
from services.protocol.ticket import TicketSequence

from .conftest import MakePair, WorkerPair, counts_steps
from .fakes import FakeSession
from .groups import admit, answer, asked, ended, num_held, of_each, right, start, tokens


@counts_steps
async def test_a_group_moves_with_its_tables(pair: WorkerPair) -> None:
    """Shared blocks stay shared, and no position is computed again."""
    pair.decode_model.pause_after = 3
    issued = await start(pair, asked(3, 20))
    await pair.until(lambda: pair.decode_model.num_begun == 4)
    pair.decode.role.hand_over(pair.session, "r1", 1)
    pair.decode_model.gate.set()
    await pair.until(lambda: bool(pair.session.of(Requeued)))
    (requeued,) = pair.session.of(Requeued)
    assert requeued.reason is RequeueReason.HANDED_OVER
    states = requeued.ticket.sequences
    assert [list(state.token_ids) for state in states] == [right(i, 5) for i in range(3)]
    assert len({state.block_ids[:2] for state in states}) == 1
    assert len({block for state in states for block in state.block_ids[2:]}) == 3 * 2
    admit(pair, replace(requeued.ticket, attempt=2))
    await pair.until(lambda: ended(pair.session) == {0, 1, 2})
    assert tokens(pair.session, issued) == {i: right(i, 20) for i in range(3)}
    assert pair.arena.num_computed == 10 + 3 * 19
    await pair.until_empty()


@counts_steps
async def test_blocks_missing_from_a_ticket_are_released(pair: WorkerPair) -> None:
    """A stop string ended one sequence while the ticket was under way."""
    pair.decode_model.pause_after = 8
    await start(pair, asked(3, 20))
    await pair.until(lambda: pair.decode_model.num_begun == 9)
    pair.decode.role.hand_over(pair.session, "r1", 1)
    pair.decode_model.gate.set()
    await pair.until(lambda: bool(pair.session.of(Requeued)))
    detached = pair.session.of(Requeued)[0].ticket
    before = await num_held(pair)
    left = (detached.sequences[0], detached.sequences[2])
    pair.decode_model.gate.clear()
    admit(pair, replace(detached, attempt=2, sequences=left))
    await pair.until(lambda: pair.decode_model.num_begun == 10)
    assert await num_held(pair) == before - 2  # 2 full ones; its tail will be somebody's next
    pair.decode_model.gate.set()
    await pair.until(lambda: ended(pair.session) == {0, 2})
    await pair.until_empty()


@counts_steps
async def test_a_group_is_preempted_as_one_and_recomputed(pair: WorkerPair) -> None:
    """Each with its own tokens after the prompt, which is cached."""
    pair.decode_model.pause_after = 5
    issued = await start(pair, asked(3, 20))
    await pair.until(lambda: pair.decode_model.num_begun == 6)
    pair.decode.role.preempt(["h-r1"])
    pair.decode_model.gate.set()
    await pair.until(lambda: bool(pair.session.of(Requeued)))
    (requeued,) = pair.session.of(Requeued)
    assert requeued.reason is RequeueReason.PREEMPTED
    got = tokens(pair.session, issued)
    assert got == {i: right(i, 7) for i in range(3)}
    await pair.until_empty()
    assert [list(state.token_ids) for state in requeued.ticket.sequences] == list(got.values())
    again = replace(requeued.ticket, attempt=2, holder_id="h-r1-2")
    resumed = await start(pair, again)
    await pair.until(lambda: ended(pair.session) == {0, 1, 2})
    for index, drawn in of_each(pair.session).items():
        prefilled_again = resumed.sequences[index].token_ids[-1]
        whole = [output.token_ids[0] for output in drawn]
        assert [right(index, 1)[0], *whole[:6], prefilled_again, *whole[6:]] == right(index, 20)
    await pair.until_empty()


async def test_groups_of_different_lengths_are_computed_again(pair: WorkerPair) -> None:
    """A gateway has the tokens that it received of each sequence, of some none."""
    states = tuple(TicketSequence(i, tuple(right(i, num))) for i, num in {0: 2, 1: 0, 4: 7}.items())
    event = await answer(pair, replace(asked(1, 12), sequences=states))
    issued, drawn = event.ticket, event.outputs
    assert {(output.index, output.position) for output in drawn} == {(0, 12), (1, 10), (4, 17)}
    assert [list(state.token_ids) for state in issued.sequences] == [
        right(0, 3),
        right(1, 1),
        right(4, 8),
    ]
    admit(pair, issued)
    await pair.until(lambda: ended(pair.session) == {0, 1, 4})
    assert tokens(pair.session, issued) == {i: right(i, 12) for i in (0, 1, 4)}
    await pair.until_empty()


async def test_the_last_group_is_preempted_when_blocks_run_out(make_pair: MakePair) -> None:
    """Each group of 3 needs 2 + 3 x 6 blocks in the end, of 30."""
    pair = await make_pair(num_blocks=30)
    pair.decode_model.gate.clear()
    first = await start(pair, asked(3, 20))
    await start(pair, asked(3, 20, range(50, 60), number=2))
    pair.decode_model.gate.set()
    await pair.until(lambda: ended(pair.session) == {0, 1, 2})
    assert tokens(pair.session, first) == {i: right(i, 20) for i in range(3)}
    (requeued,) = pair.session.of(Requeued)
    assert requeued.reason is RequeueReason.PREEMPTED
    assert requeued.request_id == "r2"
    for state in requeued.ticket.sequences:
        assert (
            list(state.token_ids) == right(state.index, 20, range(50, 60))[: len(state.token_ids)]
        )
    await pair.until_empty()


@counts_steps
async def test_a_parked_group_goes_on_where_its_client_wants_it(make_pair: MakePair) -> None:
    """With all sequences that have not ended."""
    pair = await make_pair(park_window_s=30.0)
    pair.decode_model.pause_after = 3
    wanted = asked(3, 20)
    sampling = replace(wanted.sampling, stop_token_ids=(right(1, 3)[-1],))
    issued = await start(pair, replace(wanted, sampling=sampling))
    await pair.until(lambda: pair.decode_model.num_begun == 4)
    pair.decode.role.close(pair.session)
    pair.decode_model.gate.set()
    other = FakeSession()
    await pair.until(lambda: all(job.num_slots == 0 for job in pair.decode.role.jobs))
    pair.decode.role.resume(other, Resume("r1", 6, issued.digest))
    await pair.until(lambda: bool(other.of(Requeued)))
    detached = other.of(Requeued)[0].ticket
    assert [list(state.token_ids) for state in detached.sequences] == [right(0, 5), right(2, 5)]
    pair.decode.role.abort(other, "r1", 6)
    await pair.until_empty()
