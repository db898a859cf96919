import asyncio
from typing import Any

import pytest

from blockstore.hashing import prefix_hashes
from blockstore.records import Growth
from services.engine import prefill_batching_delay as batching_delay
from services.engine.prefill_batching_delay import PrefillBatchingDelay
from services.protocol.ticket import FinishReason, SamplingParams
from services.worker.events import Failed, Output, Prefilled, Requeued, RequeueReason

from .conftest import Bench, MakeBench
from .fakes import PROMPT, FakeSession, expected, ticket
from .runs import prefilled


async def test_a_ticket_comes_back_with_blocks_and_the_first_token(bench: Bench) -> None:
    """10 tokens and one to come take 3 blocks of 4; two of them are full and published."""
    bench.prefill.submit(bench.session, ticket("r1", PROMPT))
    await bench.until(lambda: bool(bench.session.events))
    (event,) = bench.session.of(Prefilled)
    (sequence,) = event.ticket.sequences
    assert sequence.block_ids == (0, 1, 2)
    assert sequence.token_ids == tuple(expected(PROMPT, 1))
    (first,) = expected(PROMPT, 1)
    assert event.outputs == (Output("r1", 1, 0, len(PROMPT), first, None),)
    assert sequence.num_computed_tokens == 10
    assert event.ticket.holder_epoch == 2  # at rest
    (holder,) = await bench.store.holders("pool")
    assert (holder.holder_id, holder.epoch, holder.num_blocks) == ("h-r1", 2, 3)
    assert holder.order == event.ticket.order


async def test_a_ticket_is_at_rest_before_anybody_hears_of_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the decode worker could ask for it too early, and find it running."""
    detach, heard = bench.store.detach, []

    async def watched(*args: Any) -> int:
        await asyncio.sleep(0)
        heard.extend(bench.session.events)
        return await detach(*args)

    monkeypatch.setattr(bench.store, "detach", watched)
    bench.prefill.submit(bench.session, ticket("r1", PROMPT))
    await bench.until(lambda: bool(bench.session.of(Prefilled)))
    assert heard == []


async def test_a_request_that_ends_with_its_first_token_holds_nothing(bench: Bench) -> None:
    bench.prefill.submit(bench.session, ticket("r1", PROMPT, max_tokens=1))
    await bench.until(lambda: bool(bench.session.events))
    (event,) = bench.session.of(Prefilled)
    assert [output.finish for output in event.outputs] == [FinishReason.LENGTH]
    assert event.ticket.sequences == ()
    await bench.until_empty()
    assert (await bench.store.stats("pool")).num_cached == 2


async def test_a_stop_token_ends_it_too(bench: Bench) -> None:
    (first,) = expected(PROMPT, 1)
    sampling = SamplingParams(0.0, 0, 1.0, 0.0, 1, max_tokens=5, stop_token_ids=(first,))
    bench.prefill.submit(bench.session, ticket("r1", PROMPT, sampling=sampling))
    await bench.until(lambda: bool(bench.session.events))
    (event,) = bench.session.of(Prefilled)
    assert [output.finish for output in event.outputs] == [FinishReason.STOP]
    await bench.until_empty()


async def test_a_cached_prompt_computes_its_last_token_only(bench: Bench) -> None:
    """A prompt of exactly 2 blocks, cached: the last token is computed, no shared block written."""
    prompt = PROMPT[:8]
    for number in ("r1", "r2", "r3"):
        bench.prefill.submit(bench.session, ticket(number, prompt, max_tokens=1))
        await bench.until(lambda n=number: n in prefilled(bench.session))  # type: ignore[misc]
    events = bench.session.of(Prefilled)
    assert [event.ticket.num_cached_tokens for event in events] == [0, 7, 7]
    assert bench.arena.num_computed == 8 + 1 + 1
    assert len({output.token_id for event in events for output in event.outputs}) == 1
    # Who adopts a block leaves its stamp alone too: it still says the same to the next one.
    assert bench.prefill.metrics.kv_corrupt._value.get() == 0


async def test_a_prompt_that_is_not_finite_fails_alone(bench: Bench) -> None:
    """Its first blocks were finished, and others may have adopted them, before it was known."""
    poisoned = tuple(range(200, 230))
    bench.prefill_model.poison = poisoned[-1]
    bench.prefill.submit(bench.session, ticket("r1", poisoned))
    bench.prefill.submit(bench.session, ticket("r2", range(10)))
    await bench.until(lambda: bool(bench.session.of(Failed)) and "r2" in prefilled(bench.session))
    (failed,) = bench.session.of(Failed)
    assert (failed.request_id, failed.code) == ("r1", "poison_request")
    assert "not finite" in failed.message
    bench.prefill.close(bench.session)
    await bench.until_empty()
    assert await bench.store.match("pool", prefix_hashes(bytes(16), poisoned, 4)) == 0


async def test_a_shared_prefix_is_computed_once(bench: Bench) -> None:
    """Four prompts share 32 tokens: one computes them, three follow and find them."""
    prefix = tuple(range(32))
    for number in range(1, 5):
        bench.prefill.submit(bench.session, ticket(f"r{number}", (*prefix, 1000 + number)))
    await bench.until(lambda: len(bench.session.events) == 4)
    cached = sorted(event.ticket.num_cached_tokens for event in bench.session.of(Prefilled))
    assert cached == [0, 32, 32, 32]
    assert bench.arena.num_computed == 33 + 3
    for event in bench.session.of(Prefilled):
        (token,) = event.ticket.sequences[0].token_ids
        assert [token] == expected(event.ticket.prompt_token_ids, 1)


async def test_waiters_for_one_prefix_are_computed_in_one_step(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a step takes long: the first one waits for the others, which hear of their prefix a
    little later."""
    observe = PrefillBatchingDelay.observe
    monkeypatch.setattr(
        PrefillBatchingDelay, "observe", lambda self, n, _: observe(self, n, 1000.0)
    )
    monkeypatch.setattr(batching_delay, "_PAUSE_S", 0.5)  # however busy this machine is
    shared = list(range(100, 132))
    for number in range(4):
        bench.prefill.submit(bench.session, ticket(f"r{number}", [*shared, number]))
    await bench.until(lambda: len(bench.session.of(Prefilled)) == 4)
    assert bench.prefill_model.num_steps == 3  # two of the leader, of 16 tokens each


async def test_followers_go_on_when_their_leader_is_aborted(bench: Bench) -> None:
    prefix = tuple(range(40))
    bench.prefill_model.gate.clear()
    for number in (1, 2):
        bench.prefill.submit(bench.session, ticket(f"r{number}", (*prefix, number)))
    await bench.until(lambda: bench.prefill.load().num_running == 1)
    bench.prefill.abort(bench.session, "r1", 1)
    bench.prefill_model.gate.set()
    await bench.until(lambda: bool(bench.session.events))
    assert set(prefilled(bench.session)) == {"r2"}
    bench.prefill.abort(bench.session, "r2", 1)
    await bench.until_empty()


async def test_a_short_prompt_does_not_wait_for_a_long_one(bench: Bench) -> None:
    """The long one takes 5 steps or more of 16 tokens; a quarter of each step is for the short."""
    bench.prefill_model.gate.clear()
    bench.prefill.submit(bench.session, ticket("r1", range(80)))
    bench.prefill.submit(bench.session, ticket("r2", (7, 8, 9)))
    await bench.until(lambda: bench.session.began == ["r1", "r2"])
    bench.prefill_model.gate.set()
    await bench.until(lambda: len(bench.session.events) == 2)
    assert [event.ticket.request_id for event in bench.session.of(Prefilled)] == ["r2", "r1"]


async def test_an_abort_at_any_time_frees_the_blocks(bench: Bench) -> None:
    """While it waits, computes, or lies at rest."""
    bench.prefill_model.gate.clear()
    for number in range(1, 5):
        bench.prefill.submit(bench.session, ticket(f"r{number}", range(number, number + 30)))
    await bench.until(lambda: bench.prefill.load().num_running >= 1)
    for number in range(1, 4):
        bench.prefill.abort(bench.session, f"r{number}", 1)
    bench.prefill_model.gate.set()
    await bench.until(lambda: "r4" in prefilled(bench.session))
    bench.prefill.abort(bench.session, "r4", 1)
    await bench.until_empty()
    assert set(prefilled(bench.session)) == {"r4"}


async def test_an_abort_of_a_claimed_ticket_touches_nothing(bench: Bench) -> None:
    bench.prefill.submit(bench.session, ticket("r1", PROMPT))
    await bench.until(lambda: bool(bench.session.events))
    await bench.store.claim("pool", "h-r1", 2, "DecodeWorker")
    bench.prefill.abort(bench.session, "r1", 1)
    await bench.prefill.writer.flush()
    (holder,) = await bench.store.holders("pool")
    assert (holder.worker_id, holder.epoch) == ("DecodeWorker", 3)


async def test_a_lost_gateway_ends_what_came_from_it(bench: Bench) -> None:
    other = FakeSession()
    bench.prefill.submit(bench.session, ticket("r1", PROMPT))
    bench.prefill.submit(other, ticket("r2", PROMPT[:3]))
    await bench.until(lambda: bool(bench.session.events) and bool(other.events))
    bench.prefill.close(bench.session)
    await bench.prefill.writer.flush()
    assert [holder.holder_id for holder in await bench.store.holders("pool")] == ["h-r2"]


async def test_requests_left_after_the_grace_period_are_returned(bench: Bench) -> None:
    """What is computed, and a ticket that nobody has claimed."""
    bench.prefill.submit(bench.session, ticket("r1", range(10)))
    await bench.until(lambda: bool(bench.session.of(Prefilled)))
    bench.prefill_model.gate.clear()
    bench.prefill.submit(bench.session, ticket("r2", range(50, 60)))
    await bench.until(lambda: bench.prefill.load().num_running == 1)
    bench.prefill.drain()
    bench.prefill.give_back()
    bench.prefill_model.gate.set()
    async with asyncio.timeout(10):
        await bench.prefill.drained()
    await bench.until_empty()
    back = bench.session.of(Requeued)
    assert sorted(requeued.ticket.request_id for requeued in back) == ["r1", "r2"]
    assert all(requeued.reason is RequeueReason.DRAINING for requeued in back)


async def test_an_unclaimed_ticket_is_taken_back(make_bench: MakeBench) -> None:
    bench = await make_bench(ticket_ttl_s=0.02)
    bench.prefill.submit(bench.session, ticket("r1", PROMPT))
    await bench.until(lambda: len(bench.session.events) == 2)
    (requeued,) = bench.session.of(Requeued)
    assert requeued.reason is RequeueReason.STALE_TICKET
    assert requeued.ticket.sequences[0].block_ids == ()
    await bench.until_empty()


async def test_the_deadline_reaches_the_worker(bench: Bench) -> None:
    bench.prefill_model.gate.clear()
    bench.prefill.submit(bench.session, ticket("r1", PROMPT, timeout_ms=20))
    await bench.until(lambda: bench.prefill.load().num_running == 1)
    await bench.until(lambda: all(job.ending for job in bench.prefill._jobs))
    bench.prefill_model.gate.set()
    await bench.until(lambda: bool(bench.session.events))
    assert [event.code for event in bench.session.of(Failed)] == ["deadline_exceeded"]
    await bench.until_empty()


async def test_a_demand_sends_the_request_back(bench: Bench) -> None:
    """A ticket at rest gives way when a running sequence needs its blocks."""
    bench.prefill.submit(bench.session, ticket("r1", range(20)))
    await bench.until(lambda: len(bench.session.events) == 1)
    bench.prefill._on_demands(["h-r1"])
    bench.prefill._on_demands(["h-r1"])  # heard again until it has gone
    await bench.until(lambda: len(bench.session.events) == 2)
    (requeued,) = bench.session.of(Requeued)
    assert requeued.reason is RequeueReason.PREEMPTED
    await bench.until_empty()


async def test_the_pulse_brings_demands(bench: Bench) -> None:
    """The running sequence that is short may be another worker's."""
    bench.prefill.submit(bench.session, ticket("r2", PROMPT))
    await bench.until(lambda: len(bench.session.events) == 1)
    await bench.store.allocate("pool", "short", "DecodeWorker", 1, [], 29)
    await bench.store.extend("pool", "DecodeWorker", [Growth("short", 1, 29, 30)])
    await bench.until(lambda: len(bench.session.events) == 2)
    (requeued,) = bench.session.of(Requeued)
    assert requeued.reason is RequeueReason.PREEMPTED


async def test_a_demand_ends_what_is_being_computed_too(bench: Bench) -> None:
    bench.prefill_model.gate.clear()
    bench.prefill.submit(bench.session, ticket("r1", range(20)))
    await bench.until(lambda: bench.prefill.load().num_running == 1)
    bench.prefill._on_demands(["h-r1"])
    bench.prefill_model.gate.set()
    await bench.until(lambda: bool(bench.session.events))
    (requeued,) = bench.session.of(Requeued)
    assert requeued.reason is RequeueReason.PREEMPTED
    await bench.until_empty()


async def test_draining_sends_back_what_has_no_blocks(make_bench: MakeBench) -> None:
    bench = await make_bench(num_blocks=4)
    bench.prefill.submit(bench.session, ticket("r1", PROMPT))
    await bench.until(lambda: len(bench.session.events) == 1)
    bench.prefill.submit(bench.session, ticket("r2", PROMPT[::-1]))
    await bench.until(lambda: bench.prefill.load().num_waiting == 1)
    bench.prefill.drain()
    bench.prefill.submit(bench.session, ticket("r3", (1, 2)))
    assert [e.reason for e in bench.session.of(Requeued)] == [RequeueReason.DRAINING] * 2
    await bench.store.claim("pool", "h-r1", 2, "DecodeWorker")
    await bench.prefill.drained()
