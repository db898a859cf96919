"""The choice of the pool and the workers, from the state of the store and the workers."""

import pytest

from blockstore.hashing import prefix_hashes, root_hash
from blockstore.memory_store import MemoryStore
from blockstore.records import PoolSpec
from blockstore.registry import Load, Member
from services.gateway.api import GenerationRequest
from services.gateway.request.request import Request
from services.gateway.scheduling.router import Route, Router, rank_prefill, slots_of
from services.gateway.workers.pool import Pool
from services.gateway.workers.worker import PrefillLoad, Worker
from services.protocol.messages import LoadReport
from services.protocol.ticket import Adapter, SamplingParams

PROMPT = tuple(range(64))
SECRET = b"secret"


def spec(pool_id: str, num_blocks: int = 64) -> PoolSpec:
    return PoolSpec(pool_id, "toy", f"of {pool_id}", num_blocks, block_size=16, block_bytes=1)


def worker(worker_id: str, num_free_slots: int = 0, num_pending_tokens: int = 0) -> Worker:
    load = Load(num_free_slots=num_free_slots, num_pending_tokens=num_pending_tokens)
    member = Member(worker_id, "decode", "host:1", "serving", 1, 1, max_num_seqs=16, load=load)
    known = Worker(member, lambda command: None)
    known.connected = True
    return known


def pool(pool_id: str, *prefill: Worker, num_blocks: int = 64) -> Pool:
    return Pool(spec(pool_id, num_blocks), prefill or (worker("p"),), (worker("d"),))


async def cache(store: MemoryStore, asked: PoolSpec, num_blocks: int, salt: str = "") -> None:
    """Put the first blocks of PROMPT into a pool's cache."""
    hashes = prefix_hashes(root_hash(asked.fingerprint, SECRET, salt), PROMPT, 16)[:num_blocks]
    await store.register_worker(asked, "w")
    held = await store.allocate(asked.pool_id, "h", "w", 1, hashes, num_blocks)
    await store.commit(
        asked.pool_id, "h", held.epoch, list(zip(held.block_ids, hashes, strict=True))
    )
    await store.release(asked.pool_id, "h", held.epoch)


async def storing(*pools: Pool) -> MemoryStore:
    store = MemoryStore()
    for each in pools:
        await store.register_pool(each.spec)
    return store


def asked(salt: str, adapter: Adapter | None = None) -> Request:
    sampling = SamplingParams(0.0, 0, 1.0, 0.0, 7, 16)
    of_client = GenerationRequest(PROMPT, cache_salt=salt)
    return Request(of_client, "r1", "toy", PROMPT, sampling, adapter=adapter)


async def routes(
    store: MemoryStore, salt: str, *pools: Pool, adapter: Adapter | None = None
) -> list[tuple[str, int]]:
    found = await Router(store, SECRET).routes(asked(salt, adapter), pools)
    return [(route.pool.spec.pool_id, route.num_cached_blocks) for route in found]


async def test_the_pool_with_the_longest_cached_prefix_comes_first() -> None:
    pools = [pool("a"), pool("b"), pool("c")]
    store = await storing(*pools)
    await cache(store, pools[1].spec, 3)
    await cache(store, pools[2].spec, 1)
    assert await routes(store, "", *pools) == [("b", 3), ("c", 1), ("a", 0)]


async def test_blocks_cached_without_an_adapter_do_not_count_with_one() -> None:
    """No client's salt gives the root of an adapter, which is a separate part."""
    pools = [pool("a"), pool("b")]
    store = await storing(*pools)
    await cache(store, pools[0].spec, 3)
    assert await routes(store, "", *pools) == [("a", 3), ("b", 0)]
    adapter = Adapter("name", "/path", "d1")
    assert dict(await routes(store, "", *pools, adapter=adapter)) == {"a": 0, "b": 0}
    roots = {
        root_hash("f", SECRET, salt, digest)
        for salt in ("", "d1", "d2", "\0d1")
        for digest in ("", "d1", "d2")
    }
    assert len(roots) == 12


async def test_blocks_cached_under_another_salt_do_not_count() -> None:
    pools = [pool("a"), pool("b", num_blocks=32)]
    store = await storing(*pools)
    await cache(store, pools[1].spec, 3, salt="tenant")
    assert await routes(store, "tenant", *pools) == [("b", 3), ("a", 0)]
    assert await routes(store, "other", *pools) == [("a", 0), ("b", 0)]


async def test_the_pool_with_more_free_blocks_is_preferred_among_equal_ones() -> None:
    pools = [pool("a", num_blocks=8), pool("b", num_blocks=9)]
    assert await routes(await storing(*pools), "", *pools) == [("b", 0), ("a", 0)]


def route(*prefill: Worker, num_cached_blocks: int = 0) -> Route:
    only = pool("a", *prefill)
    return Route(only, b"r" * 16, prefix_hashes(b"r" * 16, PROMPT, 16), num_cached_blocks)


def test_prefill_goes_to_the_least_pending_tokens() -> None:
    busy, idle = worker("p1", num_pending_tokens=100), worker("p2", num_pending_tokens=99)
    assert rank_prefill(route(busy, idle), 64)[0] == (idle, PrefillLoad(64, route().hashes))


def test_prefill_follows_a_prefix_under_way() -> None:
    """The leader has 64 tokens to compute, the follower only its own last one."""
    leader, idle = worker("p2"), worker("p1")
    leader.prefill_loads["other"] = PrefillLoad(64, route().hashes)
    assert rank_prefill(route(idle, leader), 65)[0] == (leader, PrefillLoad(1, route().hashes))


def test_a_long_queue_outweighs_a_shared_prefix() -> None:
    leader, idle = worker("p1", num_pending_tokens=1000), worker("p2")
    leader.prefill_loads["other"] = PrefillLoad(64, route().hashes)
    chosen = rank_prefill(route(leader, idle), 65)[0]
    assert chosen is not None
    assert chosen[0] is idle


def test_a_cached_prefix_is_no_reason_to_follow() -> None:
    """All workers have the prefix in the pool: the idle one takes the request."""
    leader, idle = worker("p1"), worker("p2")
    leader.prefill_loads["other"] = PrefillLoad(10, route().hashes)
    assert rank_prefill(route(leader, idle, num_cached_blocks=4), 65)[0] == (
        idle,
        PrefillLoad(1, route().hashes),
    )


def test_without_usable_prefill_workers_there_is_no_choice() -> None:
    leaving = worker("p1")
    leaving.draining = True
    assert rank_prefill(route(leaving), 64) == []


@pytest.mark.parametrize("num_common", range(5))
def test_the_common_prefix_with_what_is_under_way_is_counted_in_blocks(num_common: int) -> None:
    theirs = prefix_hashes(b"r" * 16, (*PROMPT[: 16 * num_common], *[7] * 48), 16)
    one = worker("p1")
    one.prefill_loads = {"x": PrefillLoad(1, theirs), "y": PrefillLoad(1)}
    assert one.num_blocks_in_progress(route().hashes) == num_common


def test_free_slots_are_those_reported_less_what_we_took_since() -> None:
    decode = worker("d", num_free_slots=4)
    decode.num_taken_slots += 3
    assert decode.num_free_slots == 1
    decode.report(LoadReport(Load(num_free_slots=1)))
    assert decode.num_free_slots == 1
    decode.num_taken_slots -= 1
    assert decode.num_free_slots == 2
    decode.num_taken_slots -= 1
    assert decode.num_free_slots == 3


def test_decode_workers_are_asked_the_least_loaded_first_and_not_where_they_refused() -> None:
    workers = {name: worker(name, slots) for name, slots in (("d1", 1), ("d2", 5), ("d3", 3))}
    every = Pool(spec("a"), (), tuple(workers.values()))
    assert [each.id for each in every.open_decode()] == ["d2", "d3", "d1"]
    workers["d2"].refuse(1)
    workers["d3"].unresponsive = True
    assert [each.id for each in every.open_decode()] == ["d1"]
    workers["d2"].report(LoadReport(Load(num_free_slots=1)))
    assert [each.id for each in every.open_decode()] == ["d1", "d2"]
    workers["d2"].draining = True
    assert [each.id for each in every.open_decode()] == ["d1"]


def test_a_worker_that_refused_many_is_offered_few_until_it_has_room() -> None:
    decode = worker("d", num_free_slots=4)
    decode.refuse(8)
    assert [decode.is_open(number) for number in (1, 7, 8, 9)] == [True, True, False, False]
    decode.report(LoadReport(Load(num_free_slots=7)))
    assert not decode.is_open(8)
    decode.report(LoadReport(Load(num_free_slots=8)))
    assert decode.is_open(8)
    decode.refuse(8)
    decode.forget_refusals()
    assert decode.is_open(8)
    assert not decode.is_open(17)  # it never runs so many


# ── several pools and movers ─────────────────────────────────────────────────────────────────────

MIB = 1 << 20


def equal_spec(pool_id: str) -> PoolSpec:
    """Pools of the same weights; a block has 1 MiB."""
    return PoolSpec(pool_id, "toy", "same", 64, block_size=16, block_bytes=MIB)


def measured(worker_id: str, ms_per_token: float, num_pending_tokens: int = 0) -> Worker:
    known = worker(worker_id, num_pending_tokens=num_pending_tokens)
    known.prefill_ns_per_token = round(ms_per_token * 1e6)
    return known


async def best(
    bandwidth: float, prefill_a: tuple[Worker, ...], prefill_b: tuple[Worker, ...], cached: int = 0
) -> tuple[str, str]:
    """Where a prompt of 64 tokens that decodes in pool b is computed, and the pool from which its
    prefix is copied first. Pool a has `cached` blocks of it."""
    a = Pool(equal_spec("a"), prefill_a, ())
    b = Pool(equal_spec("b"), prefill_b, (worker("d"),))
    store = await storing(a, b)
    await cache(store, a.spec, cached)
    router = Router(store, SECRET, lambda source, target: bandwidth if source != target else 0.0)
    (route, *_) = await router.routes(asked(""), [b], [a, b])
    return route.prefill.spec.pool_id, route.source_pool_id


async def test_a_cached_prefix_is_copied_where_that_takes_less_time() -> None:
    """48 tokens at 1 ms are computed in 48 ms; a pull takes 20 ms, for 3 MiB."""
    own = (measured("p", 1.0),)
    assert await best(1000 * MIB, (), own, cached=3) == ("b", "a")
    assert await best(100 * MIB, (), own, cached=3) == ("b", "")
    assert await best(0.0, (), own, cached=3) == ("b", "")
    assert await best(1000 * MIB, (), (measured("p", 0.1),), cached=3) == ("b", "")


async def test_a_prompt_is_computed_in_another_pool_where_that_takes_less_time() -> None:
    """64 tokens of 1 ms after 1000 others, or at once in pool a with a copy of 4 MiB afterwards."""
    busy, idle = (measured("p", 1.0, 1000),), (measured("q", 1.0),)
    assert await best(100 * MIB, idle, busy) == ("a", "")
    assert await best(100 * MIB, busy, idle) == ("b", "")
    assert await best(100 * MIB, idle, ()) == ("a", ""), "pool b only decodes"


async def test_a_pool_without_prefill_and_without_a_mover_has_no_route() -> None:
    a, b = Pool(equal_spec("a"), (worker("p"),), ()), Pool(equal_spec("b"), (), (worker("d"),))
    assert await Router(await storing(a, b), SECRET).routes(asked(""), [b], [a, b]) == []


def test_a_worker_never_has_more_free_slots_than_slots() -> None:
    """A load report may be older than the request's reservation."""
    assert slots_of([worker("d", 13)], "d", num_taken=2) == (("d", 15, 16),)
    assert slots_of([worker("d", 16)], "d", num_taken=2) == (("d", 16, 16),)
