"""A worker: an engine on a pool in one of the two roles, with heartbeats, gateways and drain."""

import asyncio
from typing import Generic, Literal, TypeVar

from blockstore.registry import Role as RoleName
from quire.worker_names import worker_name
from services.protocol.worker_stream import RELOAD, stream_type
from services.runtime.errors import InvalidRequest
from services.worker.liveness.heartbeats import Heartbeats
from services.worker.pool_engine import PoolEngine, WorkerParts
from services.worker.requests.events import Session
from services.worker.roles.role import Role

_DRAIN_INTERVAL_S = 0.05

NextRole = RoleName | Literal["reload"]

R = TypeVar("R", bound=Role)


class PoolWorker(PoolEngine, Generic[R]):
    """A worker on one pool, in one event loop."""

    def __init__(self, parts: WorkerParts, role: type[R]) -> None:
        super().__init__(parts, lambda outcome: self.role.on_outcome(outcome))
        self.role: R = role(self)
        self.next_role: NextRole | None = None
        """The role that the worker takes once it is drained; None if it leaves then. RELOAD if it
        leaves to serve the weights that its process has read."""
        self._lacks_draft = parts.lacks_draft
        self.drain_asked = asyncio.Event()
        self.sessions: set[Session] = set()
        """The streams of all connected gateways."""
        pools = (self.spec, *([self.swap_pool.spec] if self.swap_pool else ()))
        self._heartbeats = Heartbeats(
            self.store,
            self.worker_id,
            tuple(spec.pool_id for spec in pools),
            on_beat=lambda: self.metrics.observe_load(self.role.load()),
            on_demands=self.role.preempt,
            is_idle=lambda: not (self.role.num_jobs or self.holders.num_returning_waiters),
            woken=self.job_added,
        )

    async def run(self) -> None:
        """Work until cancelled. Raises the first error of engine, store or a loop: it is fatal."""
        self.engine.start()
        for loop in (self.writer.run(), self._heartbeats.run(), *self.role.loops()):
            self.start(loop)
        try:
            await self.failure
        finally:
            await self.stop()

    def close_streams(self) -> None:
        """Close all gateway streams cleanly, so that gateways do not count this as a crash: the
        remaining requests continue elsewhere."""
        for session in self.sessions:
            session.finish()

    def drain(self, next_role: NextRole | None = None) -> int:
        """Accept no new requests; return how many are left to finish. Then the worker takes
        `next_role`; None lets it leave, even if it was to take a role. Raises InvalidRequest if it
        cannot take the role."""
        if next_role is not None and next_role != self.next_role:
            self._check_role(next_role)
        self.next_role = next_role
        self.draining = True
        self.drain_asked.set()
        self.role.on_drain()
        return self.role.num_busy

    def _check_role(self, role: NextRole) -> None:
        name = worker_name(self.worker_id)
        if role not in ("prefill", "decode", RELOAD):
            raise InvalidRequest(f"a worker is for prefill or decode, not for {role!r}")
        if self.draining:
            raise InvalidRequest(f"{name} drains already, so it takes no other role")
        if role == RELOAD:
            return
        if stream_type(role) in self.role.streams:
            raise InvalidRequest(f"{name} is a {role} worker already")
        if self._lacks_draft:
            raise InvalidRequest(
                f"{name} was started for prefill, without the draft model of speculative_config, "
                "which a decode worker needs: start another decode worker"
            )

    async def drained(self) -> None:
        """Return when this draining worker holds nothing: all tickets are claimed or released."""
        while True:
            if self.next_role == RELOAD:
                self.role.requeue_all()  # again: a gateway may have sent one meanwhile
            await self.writer.flush()
            is_idle = not self.role.num_busy and not self.holders.num_returning_waiters
            if is_idle and not await self._holds_anything():
                return
            await asyncio.sleep(_DRAIN_INTERVAL_S)

    async def _holds_anything(self) -> bool:
        for pool_id in self._heartbeats.pool_ids:
            holders = await self.store.holders(pool_id)
            if any(holder.worker_id == self.worker_id for holder in holders):
                return True
        return False
