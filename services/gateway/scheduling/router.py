"""Chooses where a request goes: the pool where it decodes, the pool where its prompt is computed,
and the workers there.

Usually both are one pool. With movers, the prompt may be computed in another pool, or its cached
prefix may be copied from one: whatever takes the least time.

    cost = tokens that wait at the prefill worker x time of a token
         + tokens that no cache has              x time of a token
         + blocks to copy / measured bandwidth, before and after the prefill

See ADR 30.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from blockstore.errors import StoreUnavailable, UnknownPool
from blockstore.hashing import prefix_hashes, root_hash
from blockstore.records import PoolSpec, PrefixHash
from blockstore.store import BlockStore
from services.gateway.request.events import MAX_LISTED, Placed, PrefillOption, Slots
from services.gateway.request.request import Request
from services.gateway.workers.pool import Pool
from services.gateway.workers.worker import PrefillLoad, Worker

_LONG_PROMPT_TOKENS = 8192
"""Prompts of at least this many tokens are hashed in a thread: hashing takes milliseconds."""

_COMPUTE_WEIGHT = 2
"""The weight of a token that a request computes, compared with a token that is ahead of it in the
queue. Both delay the request; only the first is work that delays others."""

_PULL_S = 0.02
"""The time of a pull whatever its size: calls of two stores, three reads."""

Bandwidth = Callable[[str, str], float]
"""The bytes a second from one pool to another, by their ids; 0: it cannot be copied."""


@dataclass(frozen=True, slots=True)
class Route:
    """A pool where a request decodes."""

    pool: Pool
    root_hash: PrefixHash
    hashes: tuple[PrefixHash, ...] = ()
    """The hashes of the prompt; empty if there is only one prefill worker."""
    num_cached_blocks: int = 0
    """The cached blocks in the pool of the prefill, with blocks that are copied there first."""
    num_free_blocks: int = 0
    prefill_pool: Pool | None = None
    """The pool that computes the prompt; None if it is `pool`."""
    source_pool_id: str = ""
    """The pool from which blocks are copied first; empty if none are."""
    cost_s: float = 0.0
    """The time until the request can decode."""

    @property
    def prefill(self) -> Pool:
        return self.prefill_pool or self.pool


@dataclass(frozen=True, slots=True)
class _Seen:
    """The store's answers about a pool, for one prompt."""

    root: PrefixHash
    hashes: tuple[PrefixHash, ...] = ()
    num_cached: int = 0
    num_free: int = 0


class Router:
    """Compares pools by what a request costs there, and by their free blocks. `bandwidth` is None
    without movers."""

    def __init__(
        self, store: BlockStore, secret: bytes, bandwidth: Bandwidth | None = None
    ) -> None:
        self.store = store
        self._secret = secret
        self._bandwidth = bandwidth or (lambda source, target: 0.0)

    def root(self, spec: PoolSpec, request: Request) -> PrefixHash:
        """The root of all prefix hashes of a pool with the request's salt and adapter."""
        adapter = "" if request.adapter is None else request.adapter.digest
        return root_hash(spec.fingerprint, self._secret, request.cache_salt, adapter)

    def can_copy(self, source_pool_id: str, target_pool_id: str) -> bool:
        return self._bandwidth(source_pool_id, target_pool_id) > 0

    async def routes(
        self,
        request: Request,
        pools: Sequence[Pool],
        prefill_pools: Sequence[Pool] | None = None,
        may_pull: bool = True,
        looks: bool = False,
    ) -> list[Route]:
        """The routes that end in `pools`, the best first: least cost, then most blocks that are
        free or cached. If the store does not answer, a pool counts as empty. Raises
        BlockStoreError.

        `prefill_pools` may compute the prompt; None is `pools`. `may_pull` tells whether a cached
        prefix is of use to the request. With `looks`, the store is asked even where
        there is no choice.
        """
        sources = pools if prefill_pools is None else prefill_pools
        known = {pool.spec.pool_id: pool for pool in (*pools, *sources)}
        compare = looks or len(known) > 1
        seen = {
            pool_id: await self._look(request, pool, compare) for pool_id, pool in known.items()
        }
        routes = [
            self._route(len(request.prompt_token_ids), pool, prefill, seen, may_pull)
            for pool in pools
            for prefill in sources
            if prefill.prefill and self._leads_to(prefill.spec, pool.spec)
        ]
        return sorted(routes, key=lambda route: (route.cost_s, -route.num_free_blocks))

    def _leads_to(self, prefill: PoolSpec, decode: PoolSpec) -> bool:
        """Whether a request can be computed in one pool and decode in the other."""
        return prefill == decode or self.can_copy(prefill.pool_id, decode.pool_id)

    def _route(
        self, num_tokens: int, pool: Pool, prefill: Pool, seen: Mapping[str, _Seen], may_pull: bool
    ) -> Route:
        here, spec = seen[prefill.spec.pool_id], prefill.spec
        ways = [("", here.num_cached, 0.0)]
        if may_pull:
            ways += self._pulls(spec, seen)

        def cost(way: tuple[str, int, float]) -> float:
            _, num_cached, pull_s = way
            num_left = max(1, num_tokens - num_cached * spec.block_size)
            return (prefill.num_pending_tokens + num_left) * prefill.s_per_token + pull_s

        source, num_cached, _ = best = min(ways, key=cost)
        move_s = 0.0
        if prefill.spec != pool.spec:
            num_blocks = -(-num_tokens // spec.block_size)
            move_s = self._pull_s(spec.pool_id, pool.spec, num_blocks)
        return Route(
            pool,
            here.root,
            here.hashes,
            num_cached,
            seen[pool.spec.pool_id].num_free,
            prefill,
            source,
            cost(best) + move_s,
        )

    def _pulls(
        self, target: PoolSpec, seen: Mapping[str, _Seen]
    ) -> Iterator[tuple[str, int, float]]:
        """The pools with a longer cached prefix that can be copied to `target`: its length in
        blocks, and the time of the copy."""
        num_here = seen[target.pool_id].num_cached
        for pool_id, there in seen.items():
            num_blocks = there.num_cached - num_here
            if num_blocks > 0 and self._bandwidth(pool_id, target.pool_id) > 0:
                yield pool_id, there.num_cached, self._pull_s(pool_id, target, num_blocks)

    def _pull_s(self, source_pool_id: str, target: PoolSpec, num_blocks: int) -> float:
        bandwidth = self._bandwidth(source_pool_id, target.pool_id)
        return _PULL_S + num_blocks * target.block_bytes / bandwidth

    async def _look(self, request: Request, pool: Pool, compare: bool) -> _Seen:
        spec, prompt = pool.spec, request.prompt_token_ids
        root = self.root(spec, request)
        if not compare and len(pool.prefill) == 1:
            return _Seen(root)
        if len(prompt) < _LONG_PROMPT_TOKENS:
            hashes = prefix_hashes(root, prompt, spec.block_size)
        else:
            hashes = await asyncio.to_thread(prefix_hashes, root, prompt, spec.block_size)
        try:
            num_cached = await self.store.match(spec.pool_id, hashes)
            if not compare:
                return _Seen(root, hashes, num_cached)
            stats = await self.store.stats(spec.pool_id)
        except (StoreUnavailable, UnknownPool):  # the ledger is lost or in recovery
            return _Seen(root, hashes)
        return _Seen(root, hashes, num_cached, stats.num_free + stats.num_cached)


def rank_prefill(route: Route, num_tokens: int) -> list[tuple[Worker, PrefillLoad]]:
    """The prefill workers that are there, with what each would compute of `num_tokens`; first the
    worker that does it soonest and with the least work. It need not compute a prefix that it
    computes for another request."""

    def load(worker: Worker) -> PrefillLoad:
        num_blocks = max(route.num_cached_blocks, worker.num_blocks_in_progress(route.hashes))
        num_left = num_tokens - num_blocks * route.prefill.spec.block_size
        return PrefillLoad(max(1, num_left), route.hashes)

    def cost(option: tuple[Worker, PrefillLoad]) -> tuple[int, str]:
        worker, load = option
        return worker.num_pending_tokens + _COMPUTE_WEIGHT * load.num_tokens, worker.id

    options = [(worker, load(worker)) for worker in route.prefill.prefill if worker.usable]
    return sorted(options, key=cost)


def placed(
    route: Route, ranked: Sequence[tuple[Worker, PrefillLoad]], decode_id: str, decode: Slots
) -> Placed:
    """The event of a request that goes to the first of the `ranked` prefill workers."""
    spec, s_per_token = route.prefill.spec, route.prefill.s_per_token
    options = (
        (worker.id, worker.num_pending_tokens, load.num_tokens)
        for worker, load in ranked[:MAX_LISTED]
    )
    return Placed(
        spec.pool_id,
        spec.fingerprint,
        spec.block_size,
        tuple(PrefillOption(*each, (each[1] + each[2]) * s_per_token) for each in options),
        decode_id,
        decode,
        route.source_pool_id,
    )


def slots_of(workers: Sequence[Worker], decode_id: str = "", num_taken: int = 0) -> Slots:
    """The slots of decode workers: first the worker of this id, as before `num_taken` of its slots
    were taken, then those with most free slots."""

    def num_free(worker: Worker) -> int:
        own = num_taken if worker.id == decode_id else 0
        # A report may be older than the reservation, and then has these slots among the free ones.
        return min(worker.num_slots, max(0, worker.num_free_slots) + own)

    ranked = sorted(workers, key=lambda each: (each.id != decode_id, -num_free(each), each.id))
    return tuple((each.id, num_free(each), each.num_slots) for each in ranked[:MAX_LISTED])
