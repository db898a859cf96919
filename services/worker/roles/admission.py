"""Decides which of the waiting requests gets blocks next."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from blockstore.errors import MustWait, OutOfBlocks, StaleHolder
from blockstore.records import PrefixHash
from services.protocol.block_keys import num_blocks_for
from services.protocol.messages import AwaitsBlocks
from services.protocol.ticket import successor_holder_id
from services.runtime.logging import get_logger
from services.worker.pool_engine import PoolEngine
from services.worker.requests.jobs import State
from services.worker.roles.prefill_job import PrefillJob

_RETRY_S = 0.05
log = get_logger(__name__)


class PrefixesInProgress:
    """The prefix hashes of full blocks whose KV a request at this worker is computing.

    The request that computes a block is its leader. A follower, a request that shares such a block,
    holds no blocks: it waits until the last block that it shares is committed or the leader has
    ended for any reason, and then asks the store for cached blocks. So a prefix is computed once.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._leaders: dict[PrefixHash, str] = {}
        self._on_change = on_change

    def __len__(self) -> int:
        return len(self._leaders)

    def last_shared(self, hashes: Sequence[PrefixHash]) -> PrefixHash | None:
        """The last of `hashes` that is being computed; None if none of them is."""
        return next((h for h in reversed(hashes) if h in self._leaders), None)

    def __contains__(self, prefix_hash: PrefixHash | None) -> bool:
        return prefix_hash in self._leaders

    def begin(self, leader: str, hashes: Iterable[PrefixHash]) -> None:
        for prefix_hash in hashes:
            self._leaders.setdefault(prefix_hash, leader)

    def end(self, leader: str, hashes: Iterable[PrefixHash]) -> None:
        """Remove hashes of blocks that are committed, or whose leader has ended."""
        for prefix_hash in hashes:
            if self._leaders.get(prefix_hash) == leader:
                del self._leaders[prefix_hash]
        self._on_change()


class Admission:
    """The requests without blocks. They get blocks in the order of `ticket.order`, while `has_room`
    says that the engine can use more.

    If the pool has too few blocks for a request, that request and all behind it wait. A request
    that shares a prefix which this worker is computing lets others pass until that is done.

    `on_admitted` gets a job with its allocation; the stamps of its adopted blocks match its tokens.
    `on_stale` gets a job whose holder id was used before.
    """

    def __init__(
        self,
        worker: PoolEngine,
        has_room: Callable[[], bool],
        on_admitted: Callable[[PrefillJob], None],
        on_stale: Callable[[PrefillJob], None],
    ) -> None:
        self._worker = worker
        self._has_room = has_room
        self._on_admitted = on_admitted
        self._on_stale = on_stale
        self._waiting: list[PrefillJob] = []
        self._woken = asyncio.Event()
        self.prefixes = PrefixesInProgress(on_change=self.wake)

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_tokens(self) -> int:
        return sum(job.num_uncomputed for job in self._waiting)

    def add(self, job: PrefillJob) -> None:
        self._waiting.append(job)
        self._waiting.sort(key=lambda job: job.ticket.order)
        self.wake()

    def remove(self, job: PrefillJob) -> None:
        self._waiting.remove(job)
        self.wake()

    def wake(self) -> None:
        """Look again whether a request can be admitted."""
        self._woken.set()

    async def run(self) -> None:
        while True:
            await self._woken.wait()
            self._woken.clear()
            if await self._is_refused():
                await self._worker.store.wait_for_room(self._worker.pool_id, _RETRY_S)
                self.wake()

    async def _is_refused(self) -> bool:
        """Admit requests in order; return whether the pool has too few blocks for the next one."""
        for job in tuple(self._waiting):
            if not self._has_room():
                return False
            if job.state is not State.WAITING or self._follows(job):
                continue
            try:
                await self._allocate(job)
            except (OutOfBlocks, MustWait) as error:
                if job.state is not State.WAITING:  # the job ended during the call
                    return False
                if not job.awaits_blocks:
                    job.awaits_blocks = True
                    job.session.send(_awaits(job, error))
                return True
            except StaleHolder:  # the holder id was used before: the gateway has to give a new one
                self._on_stale(job)
                continue
            if job.state is State.WAITING:
                self._waiting.remove(job)
                self._on_admitted(job)
            elif job.allocation is not None:  # the job ended during the call
                await self._release(job)
        return False

    def _follows(self, job: PrefillJob) -> bool:
        """Whether this worker is computing a prefix of the job for another request."""
        if job.follows not in self.prefixes:
            job.follows = self.prefixes.last_shared(job.hashes)
        return job.follows is not None

    async def _allocate(self, job: PrefillJob) -> None:
        """Get the blocks of a job, and compare stamps of adopted blocks with its tokens (law 6).

        After a mismatch the block leaves the prefix index, and the job asks again under another
        holder id, since an id is used once. OutOfBlocks, MustWait, StaleHolder: from the store.
        """
        worker, (hashes, branches) = self._worker, job.chains
        num_blocks = num_blocks_for(job.ticket, worker.spec.block_size)
        asked = worker.worker_id, job.ticket.order, hashes, num_blocks, branches
        while True:
            holder_id = job.ticket.holder_id
            asked_ns = time.time_ns()
            job.allocation = await worker.store.allocate(worker.pool_id, holder_id, *asked)
            job.trace.note_call("store allocate", asked_ns, {"quire.num_blocks": num_blocks})
            cached = job.allocation.cached(hashes, branches)
            prefix_hash = job.block_keys.first_mismatch(worker.stamps, cached)
            if prefix_hash is None:
                return
            block_id = cached[prefix_hash]
            log.error("kv_corrupt", block_id=block_id, prefix_hash=prefix_hash.hex())
            worker.metrics.kv_corrupt.inc()
            await worker.store.retract(worker.pool_id, block_id, prefix_hash)
            await self._release(job)
            if job.state is not State.WAITING:
                return  # the job has ended, and its waiter was withdrawn under the old holder id
            job.ticket = replace(job.ticket, holder_id=successor_holder_id(holder_id))

    async def _release(self, job: PrefillJob) -> None:
        assert job.allocation is not None
        holder = job.ticket.holder_id, job.allocation.epoch
        await self._worker.store.release(self._worker.pool_id, *holder)
        job.allocation = None


def _awaits(job: PrefillJob, error: OutOfBlocks | MustWait) -> AwaitsBlocks:
    numbers = (error.needed, error.available) if isinstance(error, OutOfBlocks) else ()
    return AwaitsBlocks(*job.ticket.key, *numbers)
