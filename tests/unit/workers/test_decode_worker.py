import asyncio
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from blockstore.errors import WorkerFenced
from blockstore.hashing import prefix_hashes
from services.common.errors import InvalidRequest
from services.common.runtime.metrics import WorkerMetrics
from services.decode.worker import DecodeWorker
from services.protocol.ticket import FinishReason, TicketSequence
from services.worker.events import Failed, Requeued, RequeueReason, Reserved, Step

from .conftest import Bench, MakeBench
from .fakes import PROMPT, FakeForward, expected, join, ticket
from .runs import finished, outputs, prefill, start, tokens


async def test_a_ticket_is_continued_to_its_end(bench: Bench) -> None:
    issued = await start(bench, ticket("r1", PROMPT, max_tokens=30))
    await bench.until(lambda: finished(bench.session, "r1"))
    assert tokens(bench.session, issued) == expected(PROMPT, 30)
    assert outputs(bench.session, "r1")[-1].finish is FinishReason.LENGTH
    # 10 is the prefill worker's: counted from the start of the prompt, none twice and none left out
    assert [output.position for output in outputs(bench.session, "r1")] == list(range(11, 40))
    await bench.until_empty()
    # 10 + 30 tokens, the last one's KV never computed: 9 full blocks stay cached.
    assert (await bench.store.stats("pool")).num_cached == 9


async def test_a_second_turn_finds_what_the_first_decoded(bench: Bench) -> None:
    issued = await start(bench, ticket("r1", PROMPT, max_tokens=10))
    await bench.until(lambda: finished(bench.session, "r1"))
    await bench.until_empty()
    second = (*PROMPT, *tokens(bench.session, issued), 7, 8)
    again = await prefill(bench, ticket("r2", second))
    assert again.num_cached_tokens == 16  # of the 19 whose KV was computed: 4 full blocks


async def test_many_sequences_run_in_one_batch(make_bench: MakeBench) -> None:
    bench = await make_bench(num_blocks=64)
    prompts = {f"r{n}": tuple(range(n, n + n)) for n in range(1, 9)}
    bench.decode_model.gate.clear()
    issued = [await start(bench, ticket(r, p, max_tokens=12)) for r, p in prompts.items()]
    steps_before = bench.decode_model.num_steps
    bench.decode_model.gate.set()
    await bench.until(lambda: all(finished(bench.session, r) for r in prompts))
    for one in issued:
        assert tokens(bench.session, one) == expected(one.prompt_token_ids, 12)
    assert bench.decode_model.num_steps - steps_before < 2 * 12
    await bench.until_empty()


async def test_a_sequence_that_is_not_finite_fails_alone(bench: Bench) -> None:
    """Those beside it get every token, it gets an error that says why, and nobody adopts its
    blocks: not even the finished ones, which may be what broke it."""
    poisoned = tuple(range(200, 210))
    bench.decode_model.gate.clear()
    good = await start(bench, ticket("r1", PROMPT, max_tokens=20))
    await start(bench, ticket("r2", poisoned, max_tokens=20))
    assert await bench.store.match("pool", prefix_hashes(bytes(16), poisoned, 4)) == 2
    bench.decode_model.poison = poisoned[0]
    bench.decode_model.gate.set()
    await bench.until(lambda: finished(bench.session, "r1") and bool(bench.session.of(Failed)))
    assert tokens(bench.session, good) == expected(PROMPT, 20)
    (failed,) = bench.session.of(Failed)
    assert (failed.request_id, failed.code) == ("r2", "poison_request")
    assert "not finite" in failed.message
    assert not outputs(bench.session, "r2")
    await bench.until_empty()
    assert await bench.store.match("pool", prefix_hashes(bytes(16), poisoned, 4)) == 0
    assert await bench.store.match("pool", prefix_hashes(bytes(16), PROMPT, 4)) == 2
    assert bench.decode_figures.get_sample_value("quire:num_broken_total") == 1


async def test_an_abort_of_a_sequence_that_is_not_finite_is_not_answered(bench: Bench) -> None:
    """And its blocks say nothing any more, so that no recovery publishes them again."""
    bench.decode_model.gate.clear()
    bench.decode_model.poison = PROMPT[0]
    issued = await start(bench, ticket("r1", PROMPT, max_tokens=20))
    await bench.until(lambda: bench.decode_model.num_begun == 1)
    assert len(bench.arena.stamps.complete_blocks([issued.holder_id])[issued.holder_id]) == 2
    bench.decode.abort(bench.session, *issued.key)
    bench.decode_model.gate.set()
    await bench.until_empty()
    assert bench.session.of(Failed) == []
    assert bench.arena.stamps.complete_blocks([issued.holder_id]) == {}


async def test_all_tokens_of_a_step_go_in_one_message(bench: Bench) -> None:
    bench.decode_model.gate.clear()
    for number in (1, 2, 3):
        await start(bench, ticket(f"r{number}", (number,), max_tokens=5))
    await bench.until(lambda: bench.decode.load().num_running == 3)
    bench.decode_model.gate.set()
    await bench.until(lambda: all(finished(bench.session, f"r{n}") for n in (1, 2, 3)))
    assert max(len(step.outputs) for step in bench.session.of(Step)) == 3


@pytest.mark.parametrize("block_size", [1, 4, 16])
async def test_the_youngest_gives_way_when_blocks_run_out(
    make_bench: MakeBench, block_size: int
) -> None:
    """Three sequences need 3 x 30 slots of 64: the youngest goes back, the others end."""
    bench = await make_bench(num_blocks=64 // block_size, block_size=block_size)
    bench.decode_model.gate.clear()
    issued = {
        f"r{n}": await start(bench, ticket(f"r{n}", range(n, n + 10), max_tokens=20))
        for n in (1, 2, 3)
    }
    bench.decode_model.gate.set()
    await bench.until(lambda: all(finished(bench.session, r) for r in ("r1", "r2")))
    for request_id in ("r1", "r2"):
        one = issued[request_id]
        assert tokens(bench.session, one) == expected(one.prompt_token_ids, 20)
    (requeued,) = bench.session.of(Requeued)
    assert requeued.reason is RequeueReason.PREEMPTED
    assert requeued.ticket.request_id == "r3"
    got = tokens(bench.session, issued["r3"])
    assert list(requeued.ticket.sequences[0].token_ids) == got
    await bench.until_empty()
    # The walk goes on with the tokens so far, under a new holder and attempt.
    again = replace(
        requeued.ticket,
        attempt=2,
        holder_id="h-r3-2",
        sequences=(TicketSequence(0, token_ids=tuple(got)),),
    )
    resumed = await start(bench, again)
    await bench.until(lambda: finished(bench.session, "r3"))
    # Outputs hold both attempts; the prefill worker of each drew one token more.
    first, second = issued["r3"].sequences[0].token_ids[0], resumed.sequences[0].token_ids[-1]
    drawn = [output.token_id for output in outputs(bench.session, "r3")]
    assert [first, *drawn[: len(got) - 1], second, *drawn[len(got) - 1 :]] == expected(
        range(3, 13), 20
    )
    await bench.until_empty()


async def test_an_abort_frees_blocks_and_slots_at_once(bench: Bench) -> None:
    await start(bench, ticket("r1", PROMPT, max_tokens=500))
    await bench.until(lambda: len(outputs(bench.session, "r1")) > 3)
    bench.decode.abort(bench.session, "r1", 1)
    await bench.until_empty()
    assert bench.decode.load().num_free_slots == 16
    assert not bench.session.of(Requeued)
    assert not bench.session.of(Failed)


async def test_an_abort_while_it_is_being_claimed_frees_the_blocks(bench: Bench) -> None:
    issued = await prefill(bench, ticket("r1", PROMPT, max_tokens=500))
    bench.decode.reserve(bench.session, "r1", 1, 1)
    bench.decode.admit(bench.session, issued)
    bench.decode.abort(bench.session, "r1", 1)
    await bench.until_empty()
    assert not outputs(bench.session, "r1")


async def test_an_abort_ends_a_reservation(bench: Bench) -> None:
    issued = await prefill(bench, ticket("r1", PROMPT))
    bench.decode.reserve(bench.session, "r1", 1, 1)
    assert bench.decode.load().num_free_slots == 15
    bench.decode.abort(bench.session, "r1", 1)
    assert bench.decode.load().num_free_slots == 16
    with pytest.raises(InvalidRequest):
        bench.decode.admit(bench.session, issued)


async def test_a_lost_gateway_ends_its_sequences_and_reservations(bench: Bench) -> None:
    await start(bench, ticket("r1", PROMPT, max_tokens=500))
    bench.decode.reserve(bench.session, "r2", 1, 4)
    await bench.until(lambda: bool(outputs(bench.session, "r1")))
    bench.decode.close(bench.session)
    await bench.until_empty()
    assert bench.decode.load().num_free_slots == 16


async def test_slots_are_granted_while_there_are_some(bench: Bench) -> None:
    for number in (1, 2, 3):
        bench.decode.reserve(bench.session, f"r{number}", 1, 6)
    bench.decode.reserve(bench.session, "r1", 1, 1)
    assert [event.granted for event in bench.session.of(Reserved)] == [True, True, False, False]


async def test_a_stale_ticket_goes_back(bench: Bench) -> None:
    """Its issuer has taken it back meanwhile, or another worker was faster."""
    issued = await prefill(bench, ticket("r1", PROMPT))
    await bench.store.release("pool", issued.holder_id, issued.holder_epoch)
    bench.decode.reserve(bench.session, "r1", 1, 1)
    bench.decode.admit(bench.session, issued)
    await bench.until(lambda: bool(bench.session.of(Requeued)))
    assert bench.session.of(Requeued)[0].reason is RequeueReason.STALE_TICKET
    assert bench.decode.load().num_free_slots == 16


async def test_the_deadline_ends_a_running_sequence(bench: Bench) -> None:
    issued = await prefill(bench, ticket("r1", PROMPT, max_tokens=900))
    bench.decode_model.gate.clear()
    bench.decode.reserve(bench.session, "r1", 1, 1)
    bench.decode.admit(bench.session, replace(issued, timeout_ms=20))
    await bench.until(lambda: bench.decode.load().num_running == 1)
    await bench.until(lambda: all(job.ending for job in bench.decode._jobs))
    bench.decode_model.gate.set()
    await bench.until(lambda: bool(bench.session.of(Failed)))
    assert bench.session.of(Failed)[0].code == "deadline_exceeded"
    await bench.until_empty()


async def test_a_deadline_during_the_last_step_does_not_hide_the_end(bench: Bench) -> None:
    """The gateway hears one of the two, whichever came first here."""
    issued = await prefill(bench, ticket("r1", PROMPT, max_tokens=2))
    bench.decode_model.gate.clear()
    bench.decode.reserve(bench.session, "r1", 1, 1)
    bench.decode.admit(bench.session, replace(issued, timeout_ms=20))
    await bench.until(lambda: bench.decode_model.num_begun == 1)
    await bench.until(lambda: all(job.ending for job in bench.decode._jobs))
    bench.decode_model.gate.set()
    await bench.until_empty()
    assert finished(bench.session, "r1")
    assert tokens(bench.session, issued) == expected(PROMPT, 2)


async def test_a_fenced_worker_ends(bench: Bench) -> None:
    """Its requests are elsewhere by now; its blocks are free again when it is gone."""
    fenced = await join(bench.store, bench.spec, "fenced", bench.arena.stamps)
    metrics = WorkerMetrics(CollectorRegistry())
    model = FakeForward(bench.arena)
    worker = DecodeWorker(bench.store, fenced, model, bench.decode.limits, metrics)
    running = asyncio.create_task(worker.run())
    await bench.store.fence("pool", "fenced")
    with pytest.raises(WorkerFenced):
        await asyncio.wait_for(running, timeout=10)


async def test_figures_are_those_of_the_worker(bench: Bench) -> None:
    """The prefill worker draws the first of 500 tokens; its load is shown while it has some."""
    bench.decode_model.gate.clear()
    await start(bench, ticket("r1", PROMPT, max_tokens=500))
    await bench.until(lambda: figure(bench, "num_requests_running") == 1)
    assert figure(bench, "num_free_slots") == 15
    assert bench.prefill.metrics.generation_tokens._value.get() == 1
    bench.decode_model.gate.set()
    bench.decode.abort(bench.session, "r1", 1)
    await bench.until(lambda: figure(bench, "num_requests_running") == 0)
    assert figure(bench, "num_free_slots") == 16


def figure(bench: Bench, name: str) -> float | None:
    return bench.decode_figures.get_sample_value(f"quire:{name}")


async def test_draining_lets_what_runs_finish(bench: Bench) -> None:
    issued = await start(bench, ticket("r1", PROMPT, max_tokens=20))
    assert bench.decode.drain() == 1
    bench.decode.reserve(bench.session, "r2", 1, 1)
    assert bench.session.of(Reserved)[-1].granted is False
    async with asyncio.timeout(10):
        await bench.decode.drained()
    assert tokens(bench.session, issued) == expected(PROMPT, 20)
    await bench.until_empty()
