"""Where a request goes: which pools, which decode worker of a pool, which prefill worker.

See ADR 30.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from blockstore.errors import StoreUnavailable, UnknownPool
from blockstore.hashing import prefix_hashes, root_hash
from blockstore.records import PoolSpec, PrefixHash
from blockstore.store import BlockStore
from services.gateway.workers.worker import PrefillLoad, Worker

_LONG_PROMPT_TOKENS = 8192
"""Tokens from which hashing would hold the event loop up for milliseconds."""

_COMPUTE_WEIGHT = 2
"""A token computed costs its wait, which the client feels, and the work, which everybody feels; one
that stands before it in the queue costs the wait only."""


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool and those of its workers that take work now."""

    spec: PoolSpec
    prefill: tuple[Worker, ...]
    decode: tuple[Worker, ...]

    @property
    def complete(self) -> bool:
        return bool(self.prefill and self.decode)

    @property
    def num_tokens(self) -> int:
        return self.spec.num_blocks * self.spec.block_size

    @property
    def max_slots(self) -> int:
        """Most sequences of one request that can run here."""
        return max((worker.num_slots for worker in self.decode), default=0)

    def open_decode(self, num_sequences: int = 1) -> tuple[Worker, ...]:
        """Decode workers that did not refuse so many slots, the least loaded first."""
        workers = [worker for worker in self.decode if worker.is_open(num_sequences)]
        return tuple(sorted(workers, key=lambda worker: (-worker.num_free_slots, worker.id)))


@dataclass(frozen=True, slots=True)
class Route:
    """A pool for a request; `hashes` are empty where there is nothing to choose by them."""

    pool: Pool
    root_hash: PrefixHash
    hashes: tuple[PrefixHash, ...] = ()
    num_cached_blocks: int = 0
    num_free_blocks: int = 0


class Router:
    def __init__(self, store: BlockStore, secret: bytes) -> None:
        self._store = store
        self._secret = secret

    def root(self, spec: PoolSpec, cache_salt: str) -> PrefixHash:
        """Of all prefix hashes of this salt on a pool."""
        return root_hash(spec.fingerprint, self._secret, cache_salt)

    async def routes(
        self, prompt: tuple[int, ...], cache_salt: str, pools: Sequence[Pool]
    ) -> list[Route]:
        """One for each pool, the best first: longest cached prefix, then most blocks that are free
        or can be. A store that is away, which knows neither, stops nobody. BlockStoreError."""
        routes = [await self._route(prompt, cache_salt, pool, len(pools) > 1) for pool in pools]
        return sorted(routes, key=lambda r: (-r.num_cached_blocks, -r.num_free_blocks))

    async def _route(
        self, prompt: tuple[int, ...], cache_salt: str, pool: Pool, compare: bool
    ) -> Route:
        spec = pool.spec
        root = self.root(spec, cache_salt)
        if not compare and len(pool.prefill) == 1:
            return Route(pool, root)
        if len(prompt) < _LONG_PROMPT_TOKENS:
            hashes = prefix_hashes(root, prompt, spec.block_size)
        else:
            hashes = await asyncio.to_thread(prefix_hashes, root, prompt, spec.block_size)
        try:
            num_cached = await self._store.match(spec.pool_id, hashes)
            if not compare:
                return Route(pool, root, hashes, num_cached)
            stats = await self._store.stats(spec.pool_id)
        except (StoreUnavailable, UnknownPool):  # the ledger is away, or just coming back
            return Route(pool, root, hashes)
        return Route(pool, root, hashes, num_cached, stats.num_free + stats.num_cached)


def choose_prefill(route: Route, num_tokens: int) -> tuple[Worker, PrefillLoad] | None:
    """The prefill worker where `num_tokens` are done soonest with the least work: one that computes
    the same prefix for somebody else now is spared that part; one that waits for its store only
    where they all do. None: they have all left."""
    workers = [worker for worker in route.pool.prefill if worker.usable]
    if not workers:
        return None

    def to_compute(worker: Worker) -> int:
        num_blocks = max(route.num_cached_blocks, worker.num_blocks_in_progress(route.hashes))
        return max(1, num_tokens - num_blocks * route.pool.spec.block_size)

    def cost(worker: Worker) -> tuple[bool, int, str]:
        num_tokens = worker.num_pending_tokens + _COMPUTE_WEIGHT * to_compute(worker)
        return worker.stalled, num_tokens, worker.id

    chosen = min(workers, key=cost)
    return chosen, PrefillLoad(to_compute(chosen), route.hashes)
