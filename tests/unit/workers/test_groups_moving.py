"""Groups that leave a worker with their tables, or without: moved, preempted, parked."""

from dataclasses import replace

from services.protocol.ticket import TicketSequence
from services.worker.events import Requeued, RequeueReason

from .conftest import Bench, MakeBench
from .fakes import FakeSession
from .groups import admit, answer, asked, ended, num_held, of_each, right, start, tokens


async def test_a_group_moves_with_its_tables(bench: Bench) -> None:
    """Blocks that were shared still are, and no position is computed again."""
    bench.decode_model.pause_after = 3
    issued = await start(bench, asked(3, 20))
    await bench.until(lambda: bench.decode_model.num_begun == 4)
    bench.decode.hand_over(bench.session, "r1", 1)
    bench.decode_model.gate.set()
    await bench.until(lambda: bool(bench.session.of(Requeued)))
    (requeued,) = bench.session.of(Requeued)
    assert requeued.reason is RequeueReason.HANDED_OVER
    states = requeued.ticket.sequences
    assert [list(state.token_ids) for state in states] == [right(i, 5) for i in range(3)]
    assert len({state.block_ids[:2] for state in states}) == 1
    assert len({block for state in states for block in state.block_ids[2:]}) == 3 * 2
    admit(bench, replace(requeued.ticket, attempt=2))
    await bench.until(lambda: ended(bench.session) == {0, 1, 2})
    assert tokens(bench.session, issued) == {i: right(i, 20) for i in range(3)}
    assert bench.arena.num_computed == 10 + 3 * 19
    await bench.until_empty()


async def test_blocks_missing_from_a_ticket_are_released(bench: Bench) -> None:
    """A stop string ended one while the ticket was under way."""
    bench.decode_model.pause_after = 8
    await start(bench, asked(3, 20))
    await bench.until(lambda: bench.decode_model.num_begun == 9)
    bench.decode.hand_over(bench.session, "r1", 1)
    bench.decode_model.gate.set()
    await bench.until(lambda: bool(bench.session.of(Requeued)))
    at_rest = bench.session.of(Requeued)[0].ticket
    before = await num_held(bench)
    left = (at_rest.sequences[0], at_rest.sequences[2])
    bench.decode_model.gate.clear()
    admit(bench, replace(at_rest, attempt=2, sequences=left))
    await bench.until(lambda: bench.decode_model.num_begun == 10)
    assert await num_held(bench) == before - 2  # 2 full ones; its tail will be somebody's next
    bench.decode_model.gate.set()
    await bench.until(lambda: ended(bench.session) == {0, 2})
    await bench.until_empty()


async def test_a_group_gives_way_as_one_and_is_computed_again(bench: Bench) -> None:
    """Each with its own tokens behind the prompt, which is in the cache."""
    bench.decode_model.pause_after = 5
    issued = await start(bench, asked(3, 20))
    await bench.until(lambda: bench.decode_model.num_begun == 6)
    bench.decode._on_demands(["h-r1"])
    bench.decode_model.gate.set()
    await bench.until(lambda: bool(bench.session.of(Requeued)))
    (requeued,) = bench.session.of(Requeued)
    assert requeued.reason is RequeueReason.PREEMPTED
    got = tokens(bench.session, issued)
    assert got == {i: right(i, 7) for i in range(3)}
    await bench.until_empty()
    assert [list(state.token_ids) for state in requeued.ticket.sequences] == list(got.values())
    again = replace(requeued.ticket, attempt=2, holder_id="h-r1-2")
    resumed = await start(bench, again)
    await bench.until(lambda: ended(bench.session) == {0, 1, 2})
    for index, drawn in of_each(bench.session).items():
        prefilled_again = resumed.sequences[index].token_ids[-1]
        whole = [output.token_id for output in drawn]
        assert [right(index, 1)[0], *whole[:6], prefilled_again, *whole[6:]] == right(index, 20)
    await bench.until_empty()


async def test_groups_of_different_lengths_are_computed_again(bench: Bench) -> None:
    """A gateway has of each what it received, of some nothing."""
    states = tuple(TicketSequence(i, tuple(right(i, num))) for i, num in {0: 2, 1: 0, 4: 7}.items())
    event = await answer(bench, replace(asked(1, 12), sequences=states))
    issued, drawn = event.ticket, event.outputs
    assert {(output.index, output.position) for output in drawn} == {(0, 12), (1, 10), (4, 17)}
    assert [list(state.token_ids) for state in issued.sequences] == [
        right(0, 3),
        right(1, 1),
        right(4, 8),
    ]
    admit(bench, issued)
    await bench.until(lambda: ended(bench.session) == {0, 1, 4})
    assert tokens(bench.session, issued) == {i: right(i, 12) for i in (0, 1, 4)}
    await bench.until_empty()


async def test_when_blocks_run_out_the_last_group_gives_way(make_bench: MakeBench) -> None:
    """Each group of 3 needs 2 + 3 x 6 blocks in the end, of 30."""
    bench = await make_bench(num_blocks=30)
    bench.decode_model.gate.clear()
    first = await start(bench, asked(3, 20))
    await start(bench, asked(3, 20, range(50, 60), number=2))
    bench.decode_model.gate.set()
    await bench.until(lambda: ended(bench.session) == {0, 1, 2})
    assert tokens(bench.session, first) == {i: right(i, 20) for i in range(3)}
    (requeued,) = bench.session.of(Requeued)
    assert requeued.reason is RequeueReason.PREEMPTED
    assert requeued.ticket.request_id == "r2"
    for state in requeued.ticket.sequences:
        assert (
            list(state.token_ids) == right(state.index, 20, range(50, 60))[: len(state.token_ids)]
        )
    await bench.until_empty()


async def test_a_parked_group_goes_on_where_its_client_wants_it(make_bench: MakeBench) -> None:
    """With all that have not ended; with fewer than its client wants it is computed again."""
    bench = await make_bench(park_window_s=30.0)
    bench.decode_model.pause_after = 3
    wanted = asked(3, 20)
    sampling = replace(wanted.sampling, stop_token_ids=(right(1, 3)[-1],))
    issued = await start(bench, replace(wanted, sampling=sampling))
    await bench.until(lambda: bench.decode_model.num_begun == 4)
    bench.decode.close(bench.session)
    bench.decode_model.gate.set()
    other = FakeSession()
    await bench.until(lambda: all(job.num_slots == 0 for job in bench.decode._jobs))
    bench.decode.resume(other, replace(issued, attempt=5))
    assert other.of(Requeued)[0].reason is RequeueReason.STALE_TICKET
    two = tuple(state for state in issued.sequences if state.index != 1)
    bench.decode.resume(other, replace(issued, attempt=6, sequences=two))
    await bench.until(lambda: len(other.of(Requeued)) == 2)
    at_rest = other.of(Requeued)[1].ticket
    assert [list(state.token_ids) for state in at_rest.sequences] == [right(0, 5), right(2, 5)]
    bench.decode.abort(other, "r1", 6)
    await bench.until_empty()
