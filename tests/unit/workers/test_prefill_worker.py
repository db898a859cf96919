import asyncio

from blockstore.hashing import prefix_hashes
from blockstore.memory_store import MemoryStore
from blockstore.records import Growth
from services.protocol.messages import Failed, Generated, Prefilled, Requeued, RequeueReason

from .conftest import MakePair, WorkerPair
from .fakes import PROMPT, expected, ticket
from .runs import count, prefilled


async def test_a_ticket_comes_back_with_blocks_and_the_first_token(pair: WorkerPair) -> None:
    """10 tokens and the next one take 3 blocks of 4; two of them are full and published."""
    pair.prefill.role.submit(pair.session, ticket("r1", PROMPT))
    await pair.until(lambda: bool(pair.session.events))
    (event,) = pair.session.of(Prefilled)
    (sequence,) = event.ticket.sequences
    assert sequence.block_ids == (0, 1, 2)
    assert sequence.token_ids == tuple(expected(PROMPT, 1))
    (first,) = expected(PROMPT, 1)
    assert event.outputs == (Generated("r1", 1, 0, len(PROMPT), (first,)),)
    assert sequence.num_computed_tokens == 10
    assert event.ticket.holder_epoch == 2  # at rest
    (holder,) = await pair.store.holders("pool")
    assert (holder.holder_id, holder.epoch, holder.num_blocks) == ("h-r1", 2, 3)
    assert holder.order == event.ticket.order


async def test_a_ticket_is_detached_before_its_gateway_gets_it(make_pair: MakePair) -> None:
    """Otherwise a decode worker could claim it too early, while it still runs."""
    events: list[object] = []

    class Watched(MemoryStore):
        async def detach(self, pool_id: str, holder_id: str, epoch: int) -> int:
            await asyncio.sleep(0)
            events.extend(pair.session.events)
            return await super().detach(pool_id, holder_id, epoch)

    pair = await make_pair(store=Watched())
    pair.prefill.role.submit(pair.session, ticket("r1", PROMPT))
    await pair.until(lambda: bool(pair.session.of(Prefilled)))
    assert events == []


async def test_a_cached_prompt_computes_its_last_token_only(pair: WorkerPair) -> None:
    """A cached prompt of exactly 2 blocks: the last token is computed, and no shared block is
    written."""
    prompt = PROMPT[:8]
    for number in ("r1", "r2", "r3"):
        pair.prefill.role.submit(pair.session, ticket(number, prompt, max_tokens=1))
        await pair.until(lambda n=number: n in prefilled(pair.session))  # type: ignore[misc]
    events = pair.session.of(Prefilled)
    assert [event.ticket.num_cached_tokens for event in events] == [0, 7, 7]
    for event in events:  # all have ended: the tickets hold nothing, at no epoch
        assert (event.ticket.sequences, event.ticket.holder_epoch) == ((), 0)
    assert pair.arena.num_computed == 8 + 1 + 1
    assert len({output.token_ids[0] for event in events for output in event.outputs}) == 1
    # Who adopts a block leaves its stamp alone too: it still says the same to the next one.
    assert count(pair.prefill.metrics.kv_corrupt) == 0


async def test_a_prompt_that_is_not_finite_fails_alone(pair: WorkerPair) -> None:
    """Its first blocks were finished, and other requests may have adopted them, before the fault
    was known."""
    poisoned = tuple(range(200, 230))
    pair.prefill_model.poison = poisoned[-1]
    pair.prefill.role.submit(pair.session, ticket("r1", poisoned))
    pair.prefill.role.submit(pair.session, ticket("r2", range(10)))
    await pair.until(lambda: bool(pair.session.of(Failed)) and "r2" in prefilled(pair.session))
    (failed,) = pair.session.of(Failed)
    assert (failed.request_id, failed.code) == ("r1", "poison_request")
    assert "not finite" in failed.message
    pair.prefill.role.close(pair.session)
    await pair.until_empty()
    assert await pair.store.match("pool", prefix_hashes(bytes(16), poisoned, 4)) == 0


async def test_a_shared_prefix_is_computed_once(pair: WorkerPair) -> None:
    """Four prompts share 32 tokens: one computes them, three wait and find them."""
    prefix = tuple(range(32))
    for number in range(1, 5):
        pair.prefill.role.submit(pair.session, ticket(f"r{number}", (*prefix, 1000 + number)))
    await pair.until(lambda: len(pair.session.events) == 4)
    cached = sorted(event.ticket.num_cached_tokens for event in pair.session.of(Prefilled))
    assert cached == [0, 32, 32, 32]
    assert pair.arena.num_computed == 33 + 3
    for event in pair.session.of(Prefilled):
        (token,) = event.ticket.sequences[0].token_ids
        assert [token] == expected(event.ticket.prompt_token_ids, 1)


async def test_a_short_prompt_does_not_wait_for_a_long_one(pair: WorkerPair) -> None:
    """The long one takes 5 steps or more of 16 tokens; a quarter of each step is for the short
    one."""
    pair.prefill_model.gate.clear()
    pair.prefill.role.submit(pair.session, ticket("r1", range(80)))
    pair.prefill.role.submit(pair.session, ticket("r2", (7, 8, 9)))
    await pair.until(lambda: pair.session.began == ["r1", "r2"])
    pair.prefill_model.gate.set()
    await pair.until(lambda: len(pair.session.events) == 2)
    assert [event.ticket.request_id for event in pair.session.of(Prefilled)] == ["r2", "r1"]


async def test_requests_left_after_the_grace_period_are_returned(pair: WorkerPair) -> None:
    """Computed requests, and an unclaimed ticket."""
    pair.prefill.role.submit(pair.session, ticket("r1", range(10)))
    await pair.until(lambda: bool(pair.session.of(Prefilled)))
    pair.prefill_model.gate.clear()
    pair.prefill.role.submit(pair.session, ticket("r2", range(50, 60)))
    await pair.until(lambda: pair.prefill.role.load().num_running == 1)
    pair.prefill.drain()
    pair.prefill.role.requeue_all()
    pair.prefill_model.gate.set()
    async with asyncio.timeout(10):
        await pair.prefill.drained()
    await pair.until_empty()
    back = pair.session.of(Requeued)
    assert sorted(requeued.request_id for requeued in back) == ["r1", "r2"]
    assert all(requeued.reason is RequeueReason.DRAINING for requeued in back)


async def test_a_demand_sends_the_request_back(pair: WorkerPair) -> None:
    """A ticket at rest is preempted when a running sequence needs its blocks."""
    pair.prefill.role.submit(pair.session, ticket("r1", range(20)))
    await pair.until(lambda: len(pair.session.events) == 1)
    pair.prefill.role.preempt(["h-r1"])
    pair.prefill.role.preempt(["h-r1"])  # sent again until it is gone
    await pair.until(lambda: len(pair.session.events) == 2)
    (requeued,) = pair.session.of(Requeued)
    assert requeued.reason is RequeueReason.PREEMPTED
    await pair.until_empty()


async def test_heartbeats_return_demands(pair: WorkerPair) -> None:
    """The running sequence that is short of blocks may be another worker's."""
    pair.prefill.role.submit(pair.session, ticket("r2", PROMPT))
    await pair.until(lambda: len(pair.session.events) == 1)
    await pair.store.allocate("pool", "short", "Decode", 1, [], 29)
    await pair.store.extend("pool", "Decode", [Growth("short", 1, 29, 30)])
    await pair.until(lambda: len(pair.session.events) == 2)
    (requeued,) = pair.session.of(Requeued)
    assert requeued.reason is RequeueReason.PREEMPTED


async def test_draining_sends_back_what_has_no_blocks(make_pair: MakePair) -> None:
    pair = await make_pair(num_blocks=4)
    pair.prefill.role.submit(pair.session, ticket("r1", PROMPT))
    await pair.until(lambda: len(pair.session.events) == 1)
    pair.prefill.role.submit(pair.session, ticket("r2", PROMPT[::-1]))
    await pair.until(lambda: pair.prefill.role.load().num_waiting == 1)
    pair.prefill.drain()
    pair.prefill.role.submit(pair.session, ticket("r3", (1, 2)))
    assert [e.reason for e in pair.session.of(Requeued)] == [RequeueReason.DRAINING] * 2
    await pair.store.claim("pool", "h-r1", 2, "Decode")
    await pair.prefill.drained()
