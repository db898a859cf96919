import asyncio
from typing import Any

import pytest

from blockstore.hashing import prefix_hashes
from blockstore.store import Allocation, Growth
from services.common.errors import InvalidRequest
from services.common.ticket import FinishReason, SamplingParams
from services.prefill.worker import PrefillWorker
from services.worker.events import Failed, Prefilled, Requeued, RequeueReason

from .conftest import Bench, MakeBench
from .fakes import FakeSession, expected, ticket

PROMPT = tuple(range(100, 110))


def prefilled(session: FakeSession) -> dict[str, Prefilled]:
    return {event.ticket.request_id: event for event in session.of(Prefilled)}


async def test_a_ticket_comes_back_with_blocks_and_the_first_token(bench: Bench) -> None:
    """10 tokens and one to come take 3 blocks of 4; two of them are full and published."""
    bench.prefill.submit(bench.session, ticket("r1", PROMPT))
    await bench.until(lambda: bool(bench.session.events))
    (event,) = bench.session.of(Prefilled)
    (sequence,) = event.ticket.sequences
    assert sequence.block_ids == (0, 1, 2)
    assert sequence.token_ids == tuple(expected(PROMPT, 1))
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
    assert event.finish is FinishReason.LENGTH
    assert event.ticket.sequences[0].block_ids == ()
    await bench.until_empty()
    assert (await bench.store.stats("pool")).num_cached == 2


async def test_a_stop_token_ends_it_too(bench: Bench) -> None:
    (first,) = expected(PROMPT, 1)
    sampling = SamplingParams(0.0, 0, 1.0, 0.0, 1, max_tokens=5, stop_token_ids=(first,))
    bench.prefill.submit(bench.session, ticket("r1", PROMPT, sampling=sampling))
    await bench.until(lambda: bool(bench.session.events))
    assert bench.session.of(Prefilled)[0].finish is FinishReason.STOP
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
    assert len({event.ticket.sequences[0].token_ids for event in events}) == 1
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


async def test_one_prefix_is_computed_once(bench: Bench) -> None:
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
    bench.prefill_model.gate.set()
    await bench.until(lambda: len(bench.session.events) == 2)
    assert [event.ticket.request_id for event in bench.session.of(Prefilled)] == ["r2", "r1"]


async def test_who_finds_no_blocks_waits_in_order(make_bench: MakeBench) -> None:
    """A pool of 4 blocks, r1 has all. r2 wants 4 and waits, r3 wants 1 and waits behind it."""
    bench = await make_bench(num_blocks=4)
    bench.prefill.submit(bench.session, ticket("r1", range(50, 64)))
    await bench.until(lambda: len(bench.session.events) == 1)
    bench.prefill.submit(bench.session, ticket("r2", range(14)))
    bench.prefill.submit(bench.session, ticket("r3", (1,)))
    await bench.until(lambda: bench.prefill.load().num_waiting == 2)
    bench.prefill.abort(bench.session, "r1", 1)
    await bench.until(lambda: len(bench.session.events) == 2)
    assert list(prefilled(bench.session)) == ["r1", "r2"]
    bench.prefill.abort(bench.session, "r2", 1)
    await bench.until(lambda: len(bench.session.events) == 3)
    assert list(prefilled(bench.session)) == ["r1", "r2", "r3"]


async def test_order_decides_not_the_time_of_coming(make_bench: MakeBench) -> None:
    """r9 has all 4 blocks; of those who wait for them the first in order came last."""
    bench = await make_bench(num_blocks=4)
    bench.prefill.submit(bench.session, ticket("r9", range(50, 64)))
    await bench.until(lambda: len(bench.session.events) == 1)
    for number in (5, 3, 1):
        bench.prefill.submit(bench.session, ticket(f"r{number}", range(number, number + 14)))
    for number, last in enumerate(("r9", "r1", "r3"), 2):
        bench.prefill.abort(bench.session, last, 1)
        await bench.until(lambda num=number: len(bench.session.events) == num)  # type: ignore[misc]
    assert list(prefilled(bench.session)) == ["r9", "r1", "r3", "r5"]


@pytest.mark.parametrize(
    ("max_num_seqs", "num_let_in"), [(3, 3), (100, 8)], ids=["rows", "two steps of four quarters"]
)
async def test_who_is_far_from_its_turn_holds_nothing(
    make_bench: MakeBench, max_num_seqs: int, num_let_in: int
) -> None:
    """12 prompts of 10 tokens: the engine computes 16 a step, and a prompt counts as 4 at most."""
    bench = await make_bench(num_blocks=64, max_num_seqs=max_num_seqs)
    bench.prefill_model.gate.clear()
    for number in range(1, 13):
        bench.prefill.submit(bench.session, ticket(f"r{number}", range(number, number + 10)))
    await bench.until(lambda: bench.prefill.load().num_running == num_let_in)
    assert len(await bench.store.holders("pool")) == num_let_in
    bench.prefill_model.gate.set()
    await bench.until(lambda: len(bench.session.events) == 12)


async def test_a_waiter_that_is_aborted_lets_the_next_one_in(make_bench: MakeBench) -> None:
    bench = await make_bench(num_blocks=4)
    bench.prefill.submit(bench.session, ticket("r1", PROMPT))
    await bench.until(lambda: len(bench.session.events) == 1)
    bench.prefill.submit(bench.session, ticket("r2", range(10)))
    bench.prefill.submit(bench.session, ticket("r3", (1,)))
    waiters = bench.store.ledger("pool").waiters
    await bench.until(lambda: "h-r2" in waiters)
    bench.prefill.abort(bench.session, "r2", 1)
    await bench.until(lambda: len(bench.session.events) == 2)
    assert list(prefilled(bench.session)) == ["r1", "r3"]


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


async def test_what_is_left_when_the_grace_is_over_goes_back(bench: Bench) -> None:
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


@pytest.mark.parametrize(("wrong", "num_cached_tokens"), [(0, 0), (1, 4)])
async def test_a_block_that_says_something_else_is_never_adopted(
    bench: Bench, wrong: int, num_cached_tokens: int
) -> None:
    """Law 6: an index entry that leads to another prompt's KV is retracted, not served; what is
    right before it is."""
    bench.prefill.submit(bench.session, ticket("r1", PROMPT, max_tokens=1))
    await bench.until(lambda: bool(bench.session.events))
    bench.prefill._admission._stamps.own([wrong], "somebody else")
    bench.prefill.submit(bench.session, ticket("r2", PROMPT))
    await bench.until(lambda: len(bench.session.events) == 2)
    event = prefilled(bench.session)["r2"]
    assert event.ticket.num_cached_tokens == num_cached_tokens
    assert event.ticket.holder_id == "h-r2+"
    assert event.ticket.sequences[0].token_ids == tuple(expected(PROMPT, 1))
    assert bench.prefill.metrics.kv_corrupt._value.get() == 1
    bench.prefill.abort(bench.session, "r2", 1)
    await bench.until_empty()


@pytest.mark.parametrize(
    ("parent", "tokens"),
    [(b"o" * 16, PROMPT[:4]), (bytes(16), (*PROMPT[:3], 7))],
    ids=["another parent", "other tokens"],
)
async def test_an_equal_hash_is_not_enough(
    bench: Bench, parent: bytes, tokens: tuple[int, ...]
) -> None:
    """Two prompts whose hashes collide: the block says whose it is."""
    bench.prefill.submit(bench.session, ticket("r1", PROMPT, max_tokens=1))
    await bench.until(lambda: bool(bench.session.events))
    bench.arena.stamps.own([0], "h-r1")
    (first, _) = prefix_hashes(bytes(16), PROMPT, block_size=4)
    bench.arena.stamps.complete(0, first, parent, tokens)
    bench.prefill.submit(bench.session, ticket("r2", PROMPT, max_tokens=1))
    await bench.until(lambda: len(bench.session.events) == 2)
    assert prefilled(bench.session)["r2"].ticket.num_cached_tokens == 0
    assert bench.prefill.metrics.kv_corrupt._value.get() == 1


async def test_an_abort_while_blocks_are_asked_for_frees_them(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = bench.store.allocate

    async def slow(*args: Any) -> Allocation:
        allocation = await allocate(*args)
        bench.prefill.abort(bench.session, "r1", 1)
        return allocation

    monkeypatch.setattr(bench.store, "allocate", slow)
    bench.prefill.submit(bench.session, ticket("r1", PROMPT))
    await bench.until(lambda: not bench.prefill.load().num_waiting)
    await bench.until_empty()
    assert not bench.session.events


async def test_an_abort_while_a_wrong_block_is_given_up_leaves_no_waiter(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would withdraw the successor of a holder whose request has ended."""
    bench = await make_bench(num_blocks=3)
    bench.prefill.submit(bench.session, ticket("r1", PROMPT, max_tokens=1))
    await bench.until(lambda: bool(bench.session.events))
    bench.prefill._admission._stamps.own([0], "somebody else")
    retract, submitted = bench.store.retract, ticket("r2", PROMPT)

    async def aborted(*args: Any) -> None:
        await retract(*args)
        bench.prefill.abort(bench.session, "r2", 1)
        await bench.store.release("pool", "h-r2", 1)
        await bench.store.allocate("pool", "other", "DecodeWorker", 0, [], 3)

    monkeypatch.setattr(bench.store, "retract", aborted)
    bench.prefill.submit(bench.session, submitted)
    await bench.until(lambda: bench.prefill.metrics.kv_corrupt._value.get() == 1)
    await bench.prefill.writer.flush()
    await bench.store.release("pool", "other", 1)
    await bench.until_empty()
    assert (await bench.store.stats("pool")).num_waiters == 0


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


@pytest.mark.parametrize(
    "changes",
    [
        {"pool_id": "another"},
        {"prompt_token_ids": tuple(range(1000))},
        {"prompt_token_ids": tuple(range(128))},  # 32 blocks of 4, and no slot for the token drawn
        {"sequences": ()},
    ],
)
async def test_a_ticket_that_does_not_fit_is_refused(bench: Bench, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        bench.prefill.submit(bench.session, ticket("r1", PROMPT, **changes))
    assert isinstance(bench.prefill, PrefillWorker)


async def test_a_holder_that_was_used_before_costs_its_request_only(bench: Bench) -> None:
    """A gateway that gives one out twice hears of it; the worker goes on."""
    bench.prefill.submit(bench.session, ticket("r1", PROMPT, max_tokens=1))
    await bench.until(lambda: len(bench.session.events) == 1)
    bench.prefill.submit(bench.session, ticket("r2", PROMPT, holder_id="h-r1"))
    bench.prefill.submit(bench.session, ticket("r3", PROMPT, max_tokens=1))
    await bench.until(lambda: len(bench.session.events) == 3)
    (requeued,) = bench.session.of(Requeued)
    assert requeued.ticket.request_id == "r2"
    assert requeued.reason is RequeueReason.STALE_TICKET
    assert set(prefilled(bench.session)) == {"r1", "r3"}
    await bench.until_empty()


async def test_the_same_attempt_twice_is_refused(bench: Bench) -> None:
    bench.prefill_model.gate.clear()
    bench.prefill.submit(bench.session, ticket("r1", PROMPT))
    with pytest.raises(InvalidRequest):
        bench.prefill.submit(bench.session, ticket("r1", PROMPT))
