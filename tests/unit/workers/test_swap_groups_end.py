"""What becomes of groups that are swapped out when some of their sequences end, all are cancelled,
or their worker leaves. Blocks of 4."""

from dataclasses import replace

import pytest

from services.worker.events import EXPIRED, Failed, Requeued

from .conftest import MakeBench
from .giving_way import asked, come_back, evict_all, finish, give_way, right, running, swapped_out


async def test_ended_sequences_are_not_copied(make_bench: MakeBench) -> None:
    """1 ends with its fourth token; the others give way later."""
    bench = await make_bench(64, num_swap_blocks=32)
    back = await swapped_out(bench, asked(3, stop=right(1)[3:4]))
    assert back.swapped is not None
    assert [table.index for table in back.swapped.tables] == [0, 2]
    issued = await come_back(bench, back)
    assert await finish(bench, issued) == {index: right(index) for index in (0, 2)}


async def test_a_request_that_ends_while_swapped_out_is_not_brought_back(
    make_bench: MakeBench,
) -> None:
    """Its stop string was found late; the others come back, and nothing of it stays."""
    bench = await make_bench(64, num_swap_blocks=32)
    back = await swapped_out(bench, asked(3))
    bench.decode.abort(bench.session, "r1", 1, 1)
    evict_all(bench)
    left = (back.sequences[0], back.sequences[2])
    num_copied = bench.arena.num_copied
    issued = await come_back(bench, replace(back, sequences=left))
    assert bench.arena.num_copied - num_copied == 2 + 2 * 3
    assert await finish(bench, issued) == {index: right(index) for index in (0, 2)}


@pytest.mark.parametrize("is_copied", [True, False])
async def test_a_cancelled_request_leaves_nothing(make_bench: MakeBench, is_copied: bool) -> None:
    """At rest there, or while it is copied; one by one, too."""
    bench = await make_bench(64, num_swap_blocks=32)
    assert bench.swap_pool is not None
    await running(bench, asked(3), 6)
    if is_copied:
        await give_way(bench)
    else:
        bench.swap_pool.copying.clear()
        bench.decode._on_demands(["h-r1"])
        bench.decode_model.gate.set()
        await bench.until(lambda: bench.decode.load().num_running == 0)
    for index in (1, 0, 2):
        bench.decode.abort(bench.session, "r1", 1, index)
    bench.swap_pool.copying.set()
    await bench.until_empty()
    await bench.until_colder_is_empty()
    await bench.until(lambda: not len(bench.decode._jobs))
    assert len(bench.session.of(Requeued)) == is_copied


async def test_a_deadline_is_kept_while_it_is_swapped_out(make_bench: MakeBench) -> None:
    bench = await make_bench(64, num_swap_blocks=32)
    await swapped_out(bench, asked(3))
    (job,) = bench.decode._jobs
    bench.decode._end(job, EXPIRED)
    await bench.until(lambda: bool(bench.session.of(Failed)))
    assert bench.session.of(Failed)[0].code == "deadline_exceeded"
    await bench.until_empty()
    await bench.until_colder_is_empty()


async def test_a_worker_that_is_drained_waits_for_what_it_has_swapped_out(
    make_bench: MakeBench,
) -> None:
    """Its gateway has it brought back elsewhere; then the worker can go."""
    bench = await make_bench(64, num_swap_blocks=32)
    back = await swapped_out(bench, asked(3))
    assert bench.decode.drain() == 0
    issued = await come_back(bench, back)
    bench.decode.abort(bench.session, "r1", 1)  # as its gateway does, once it is back
    await bench.decode.drained()
    await bench.until_colder_is_empty()
    assert [state.token_ids for state in issued.sequences] == [right(i, 9) for i in range(3)]
