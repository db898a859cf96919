"""Chooses where a request goes: the pool, its decode worker and its prefill worker.

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
"""Prompts of at least this many tokens are hashed in a thread: hashing takes milliseconds."""

_COMPUTE_WEIGHT = 2
"""The weight of a token that a request computes, compared with a token that is ahead of it in the
queue. Both delay the request; only the first is work that delays others."""


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool, and its workers that take work now."""

    spec: PoolSpec
    prefill: tuple[Worker, ...]
    decode: tuple[Worker, ...]

    @property
    def complete(self) -> bool:
        return bool(self.prefill and self.decode)

    @property
    def max_slots(self) -> int:
        """Most sequences of one request that can run here."""
        return max((worker.num_slots for worker in self.decode), default=0)

    def has_open(self, num_slots: int) -> bool:
        """Whether a decode worker may grant the slots; 0 slots need none."""
        return not num_slots or bool(self.open_decode(num_slots))

    def open_decode(self, num_sequences: int = 1) -> tuple[Worker, ...]:
        """The decode workers that may grant `num_sequences` slots, the least loaded first."""
        workers = [worker for worker in self.decode if worker.is_open(num_sequences)]
        return tuple(sorted(workers, key=lambda worker: (-worker.num_free_slots, worker.id)))


@dataclass(frozen=True, slots=True)
class Route:
    """A pool for a request. `hashes`: of the prompt; empty if there is only one prefill worker."""

    pool: Pool
    root_hash: PrefixHash
    hashes: tuple[PrefixHash, ...] = ()
    num_cached_blocks: int = 0
    num_free_blocks: int = 0


class Router:
    """Compares pools by the cached prefix of a prompt and by their free blocks."""

    def __init__(self, store: BlockStore, secret: bytes) -> None:
        self._store = store
        self._secret = secret

    def root(self, spec: PoolSpec, cache_salt: str) -> PrefixHash:
        """The root of all prefix hashes of a pool with this salt."""
        return root_hash(spec.fingerprint, self._secret, cache_salt)

    async def routes(
        self, prompt: tuple[int, ...], cache_salt: str, pools: Sequence[Pool]
    ) -> list[Route]:
        """One route for each pool, the best first: longest cached prefix, then most blocks that are
        free or cached. If the store does not answer, both numbers are 0. BlockStoreError."""
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
        except (StoreUnavailable, UnknownPool):  # the ledger is lost or in recovery
            return Route(pool, root, hashes)
        return Route(pool, root, hashes, num_cached, stats.num_free + stats.num_cached)


def choose_prefill(route: Route, num_tokens: int) -> tuple[Worker, PrefillLoad] | None:
    """The prefill worker that computes `num_tokens` soonest and with the least work. It need not
    compute a prefix that it computes for another request. A worker that waits for its store is
    chosen only if all of them do. None: all workers have left."""
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
