"""A worker: an engine on a pool in one role or both, with heartbeats, gateways and drain."""

import asyncio
from collections.abc import Sequence
from typing import Any, Generic, Literal, TypeVar

from blockstore.registry import Load
from blockstore.registry import Role as RoleName
from quire.worker_names import worker_name
from services.engine.sequences.results import Advance
from services.protocol.worker_stream import RELOAD, stream_type
from services.runtime.errors import InvalidRequest
from services.worker.liveness.heartbeats import Heartbeats
from services.worker.pool_engine import PoolEngine, WorkerParts
from services.worker.requests.events import Session
from services.worker.roles.role import Role

_DRAIN_INTERVAL_S = 0.05

NextRole = RoleName | Literal["reload"]

R = TypeVar("R", bound=Role[Any])


class PoolWorker(PoolEngine, Generic[R]):
    """A worker on one pool, in one event loop."""

    def __init__(
        self, parts: WorkerParts, role: type[R], mixed: Sequence[type[Role[Any]]] = ()
    ) -> None:
        """`mixed` are roles that the worker has beside its own."""
        super().__init__(parts, self._give_advances)
        self.role: R = role(self)
        self.roles: Sequence[Role[Any]] = (*(each(self) for each in mixed), self.role)
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
            on_beat=lambda: self.metrics.observe_load(self.load()),
            on_demands=self.preempt,
            is_idle=self._is_idle,
            woken=self.job_added,
        )

    async def run(self) -> None:
        """Work until cancelled. Raises the first error of engine, store or a loop: it is fatal."""
        self.engine.start()
        for loop in (
            self.writer.run(),
            self._heartbeats.run(),
            *(loop for role in self.roles for loop in role.loops()),
        ):
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
        for each in self.roles:
            each.on_drain()
        return self.num_busy

    def _check_role(self, role: NextRole) -> None:
        name = worker_name(self.worker_id)
        if role not in ("prefill", "decode", RELOAD):
            raise InvalidRequest(f"a worker is for prefill or decode, not for {role!r}")
        if self.draining:
            raise InvalidRequest(f"{name} drains already, so it takes no other role")
        if role == RELOAD:
            return
        if any(each.stream is stream_type(role) for each in self.roles):
            raise InvalidRequest(f"{name} is a {role} worker already")
        if self._lacks_draft:
            raise InvalidRequest(
                f"{name} was started for prefill, without the draft model of speculative_config, "
                "which a decode worker needs: start another decode worker"
            )

    @property
    def num_busy(self) -> int:
        """How many requests still need work at this worker; detached tickets do not."""
        return sum(role.num_busy for role in self.roles)

    def load(self) -> Load:
        """The load that this worker reports to the registry and its gateways."""
        loads = [role.load() for role in self.roles]
        return Load(
            num_running=sum(load.num_running for load in loads),
            num_waiting=sum(load.num_waiting for load in loads),
            num_free_slots=sum(load.num_free_slots for load in loads),
            num_pending_tokens=sum(load.num_pending_tokens for load in loads),
            **self.step_meter.figures(),
        )

    def requeue_all(self) -> None:
        """Requeue all requests at their gateways, to be computed again elsewhere."""
        for role in self.roles:
            role.requeue_all()

    def preempt(self, holder_ids: Sequence[str]) -> None:
        """Preempt these holders. Decode comes first: the prefill role may not have heard yet that a
        detached ticket of its own was claimed here."""
        for role in reversed(self.roles):
            role.preempt(holder_ids)
            holder_ids = [each for each in holder_ids if each not in role.running]

    def _is_idle(self) -> bool:
        has_jobs = any(len(role.jobs) for role in self.roles)
        return not has_jobs and not self.holders.num_returning_waiters

    def _give_advances(self, advances: Sequence[Advance]) -> None:
        """Give each role what a step did with its groups."""
        *others, last = self.roles
        for role in others:
            own = [advance for advance in advances if advance.key in role.running]
            advances = [advance for advance in advances if advance.key not in role.running]
            if own:
                role.on_advances(own)
        last.on_advances(advances)

    async def drained(self) -> None:
        """Return when this draining worker holds nothing: all tickets are claimed or released."""
        while True:
            if self.next_role == RELOAD:
                self.requeue_all()  # again: a gateway may have sent one meanwhile
            await self.writer.flush()
            is_idle = not self.num_busy and not self.holders.num_returning_waiters
            if is_idle and not await self._holds_anything():
                return
            await asyncio.sleep(_DRAIN_INTERVAL_S)

    async def _holds_anything(self) -> bool:
        for pool_id in self._heartbeats.pool_ids:
            holders = await self.store.holders(pool_id)
            if any(holder.worker_id == self.worker_id for holder in holders):
                return True
        return False
