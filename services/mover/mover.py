"""The mover: keeps the sources joined, and runs the pulls of its pool."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import NoReturn

from blockstore.errors import BlockStoreError, WorkerFenced
from blockstore.registry import Member, Registry
from services.mover.config import MoverSettings
from services.mover.own_pool import OwnPool
from services.mover.pull import Pull, PullFailed, Target
from services.mover.source import Side, Source, open_source
from services.mover.transport import Transport, TransportError
from services.pool.header import BadHeader
from services.protocol.ticket import Ticket
from services.runtime.errors import QuireError, Unavailable
from services.runtime.logging import get_logger
from services.runtime.metrics import MoverMetrics
from services.runtime.ticks import until_tick

log = get_logger(__name__)

_POLL_S = 1.0
_HEARTBEAT_S = 0.1
_IDLE_HEARTBEAT_S = 0.5
_ALONE_S = 3.0
"""How long a mover stays on a pool without workers, which may be restarting."""

BANDWIDTH = "bandwidth:"
"""The prefix of a mover's registry fields with the bandwidth, in bytes a second, from the pool of
this id."""


class Mover:
    """Pulls into its own pool, which is the `target` side of the pulls."""

    def __init__(
        self,
        own: OwnPool,
        target: Target,
        transport: Transport,
        registry: Registry,
        settings: MoverSettings,
        metrics: MoverMetrics,
    ) -> None:
        self._own = own
        self._target = target
        self._transport = transport
        self._registry = registry
        self._settings = settings
        self._metrics = metrics
        self._sources: dict[str, Source] = {}  # by member id of the other mover
        self._opening: set[str] = set()
        self._different: set[str] = set()
        self._pulls: set[Pull] = set()
        self._running: set[asyncio.Task[None]] = set()

    @property
    def bandwidths(self) -> dict[str, str]:
        """The pools that can be pulled from, with their bandwidths, for the registry."""
        return {
            BANDWIDTH + source.pool_id: str(round(source.bytes_per_s))
            for source in self._sources.values()
            if source.has_lease
        }

    # Pulls.

    @asynccontextmanager
    async def pulling(
        self, ticket: Ticket, source_pool_id: str
    ) -> AsyncIterator[tuple["asyncio.Future[Ticket | None]", Pull]]:
        """Pull a ticket, and yield the pull and a future of the ticket in the own pool: None if
        only the prefix cache was filled, Unavailable with the reason if nothing was copied. At the
        end of the block the pull is given up, and its blocks are released unless a worker has
        claimed them. Raises Unavailable if the mover does not read that pool."""
        source = self._source_of(source_pool_id)
        pull = Pull(
            self._transport,
            source,
            self._target,
            ticket,
            self._settings.pull_timeout_s,
            self._settings.pull_timeout_s / 2,
        )
        answer: asyncio.Future[Ticket | None] = asyncio.get_running_loop().create_future()
        over = asyncio.Event()
        task = asyncio.create_task(self._run(source, pull, answer, over))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            yield answer, pull
        finally:
            answer.cancel()
            pull.give_up()
            over.set()

    async def _run(
        self,
        source: Source,
        pull: Pull,
        answer: "asyncio.Future[Ticket | None]",
        over: asyncio.Event,
    ) -> None:
        """Run a pull to its end, even if nobody waits for it any more."""
        labels, began = source.pool_id, asyncio.get_running_loop().time()
        self._pulls.add(pull)
        moved: Ticket | None = None
        try:
            moved = await pull.run()
            self._note(source, pull, asyncio.get_running_loop().time() - began)
            if not answer.done():
                answer.set_result(moved)
                await over.wait()
        except Exception as error:  # of any kind: the call must get an answer
            reason = error.reason if isinstance(error, PullFailed) else "error"
            self._metrics.pulls.labels(labels, reason).inc()
            is_known = isinstance(error, PullFailed | BlockStoreError)
            log.warning(
                "pull_failed",
                source=labels,
                reason=str(error),
                exc_info=None if is_known else error,
            )
            if not answer.done():
                answer.set_exception(Unavailable(f"nothing was pulled from {labels}: {error}"))
        finally:
            self._pulls.discard(pull)
            if moved is not None:
                await pull.release(moved)

    def _note(self, source: Source, pull: Pull, seconds: float) -> None:
        labels = source.pool_id
        self._metrics.pulls.labels(labels, "done").inc()
        if pull.num_blocks:
            self._metrics.blocks.labels(labels).inc(pull.num_blocks)
            self._metrics.seconds.labels(labels).observe(seconds)
            num_bytes = pull.num_blocks * self._own.spec.block_bytes
            source.measure(num_bytes, pull.reading_s)
            self._show_bandwidth(source)

    def _source_of(self, pool_id: str) -> Source:
        for source in self._sources.values():
            if source.pool_id == pool_id and source.has_lease:
                return source
        raise Unavailable(f"this mover does not read pool {pool_id!r} now")

    def _preempt(self, side: Side, demands: tuple[str, ...]) -> None:
        """Give up the pulls that hold what a pool demands back."""
        for holder_id in demands:
            for pull in self._pulls:
                if pull.holds(side, holder_id):
                    pull.give_up()

    async def close(self) -> None:
        """Give up all pulls, wait until nothing lands any more, and leave the sources. The calls
        that wait for tickets to be claimed have ended."""
        for pull in tuple(self._pulls):
            pull.give_up()
        if self._running:
            await asyncio.wait(self._running)
        for member_id in tuple(self._sources):
            await self._close_source(member_id)

    # The own pool.

    async def keep_membership(self) -> None:
        """Send heartbeats until the pool has no workers any more. Raises WorkerFenced and errors of
        the store."""
        alone_since: float | None = None
        clock = asyncio.get_running_loop().time
        while True:
            pool_id, member_id = self._own.spec.pool_id, self._own.member_id
            heartbeat = await self._own.store.heartbeat(pool_id, member_id)
            if heartbeat.fenced or self._own.lock.is_revoked:
                raise WorkerFenced(f"{member_id} was fenced")
            self._preempt(self._target, heartbeat.demands)
            if self._own.has_workers:
                alone_since = None
            elif alone_since is None:
                alone_since = clock()
            elif clock() - alone_since > _ALONE_S:
                return
            await asyncio.sleep(until_tick(_HEARTBEAT_S if self._pulls else _IDLE_HEARTBEAT_S))

    # The sources.

    async def follow_movers(self) -> NoReturn:
        """Join the pools of the movers in the registry, and leave those whose movers are gone."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                with suppress(BlockStoreError):
                    movers = {
                        member.member_id: member
                        for member in await self._registry.members()
                        if member.role == "mover" and member.pool_id != self._own.spec.pool_id
                    }
                    for member_id in self._sources.keys() - movers.keys():
                        await self._close_source(member_id)
                    known = self._sources.keys() | self._opening | self._different
                    for member_id in movers.keys() - known:
                        self._opening.add(member_id)
                        tasks.create_task(self._keep_source(movers[member_id]))
                await asyncio.sleep(until_tick(_POLL_S))

    async def _keep_source(self, member: Member) -> None:
        """Join a mover's pool, and renew the lease there until it is lost."""
        try:
            source = await open_source(member, self._own.header, self._transport, self._settings)
        except (QuireError, BlockStoreError, TransportError, BadHeader) as error:
            log.warning("source_not_joined", member_id=member.member_id, reason=str(error))
            await asyncio.sleep(until_tick(_POLL_S))
            return
        finally:
            self._opening.discard(member.member_id)
        if source is None:
            self._different.add(member.member_id)
            return
        self._sources[member.member_id] = source
        self._show_bandwidth(source)
        while source.has_lease:
            await asyncio.sleep(source.renewal_s)
            try:
                self._preempt(source, await source.renew())
            except BlockStoreError as error:
                log.warning("lease_not_renewed", member_id=member.member_id, reason=str(error))
        await self._close_source(member.member_id)

    async def _close_source(self, member_id: str) -> None:
        source = self._sources.pop(member_id, None)
        if source is None:
            return
        source.is_broken = True
        for pull in self._pulls:
            if pull.reads(source):
                pull.give_up()
        log.warning("source_left", pool_id=source.pool_id)
        await source.close(self._transport)
        others = {other.pool_id for other in self._sources.values()}
        if source.pool_id not in others:  # else its mover came back under another name
            self._metrics.forget(source.pool_id)

    def _show_bandwidth(self, source: Source) -> None:
        pool_id, bytes_per_s = source.pool_id, source.bytes_per_s
        is_slow = bytes_per_s < self._settings.min_bandwidth
        self._metrics.bandwidth.labels(pool_id).set(bytes_per_s)
        self._metrics.slow.labels(pool_id).set(is_slow)
        if is_slow:
            log.warning(
                "source_slow",
                pool_id=pool_id,
                bandwidth_bytes_per_s=round(bytes_per_s),
                min_bandwidth=self._settings.min_bandwidth,
            )
