"""Disturbs the workers of the matrix of exactness in the middle of an answer."""

import asyncio
from collections.abc import Sequence

from blockstore.registry import Role
from services.worker.requests.events import HANDED_OVER

from .exactness_deployment import ExactnessDeployment
from .exactness_parts import DeployedWorker


class DisturbedDeployment(ExactnessDeployment):
    """A deployment with the disturbances that the compared request has to survive."""

    async def until_paused(self, workers: Sequence[DeployedWorker]) -> DeployedWorker:
        """Wait for the one that pauses; the gateway then has all messages that it sent before."""
        await self.until(lambda: any(r.forward.is_paused for r in workers))
        (paused,) = (r for r in workers if r.forward.is_paused)
        await asyncio.sleep(0)
        return paused

    async def preempt(self, paused: DeployedWorker) -> None:
        """Preempt all requests of a paused worker."""
        paused.worker.preempt([job.ticket.holder_id for job in paused.worker.role.jobs])
        self.go_on()

    async def drain(self, paused: DeployedWorker, next_role: Role | None = None) -> None:
        """Move all requests of a paused worker to another one, with their blocks."""
        paused.worker.drain(next_role)
        jobs = paused.worker.role.jobs
        await self.until(lambda: all(job.ending is HANDED_OVER for job in jobs))
        self.go_on()

    async def change_role(self, paused: DeployedWorker) -> None:
        """Let a paused decode worker become the only prefill worker that takes requests."""
        await self.drain(paused, "prefill")
        await paused.worker.drained()
        paused.running.cancel()
        await asyncio.wait([paused.running])
        for prefill in self.prefills:
            prefill.worker.drain()
        parts = paused.parts, paused.forward, paused.request_metrics
        self.prefills.append(await self._serve("prefill", *parts))
        self.decoders.remove(paused)
        await self._until_connected()

    async def upgrade(self, paused: DeployedWorker, pool_id: str = "pool") -> None:
        """Start a worker of each role on this pool, and let the others leave. Requests that cannot
        move are requeued at the end of the grace period."""
        olds = (*self.prefills, *self.decoders)
        self.prefills.append(await self._add("prefill", len(self.prefills), pool_id))
        self.decoders.append(await self._add("decode", len(self.decoders), pool_id))
        await self._until_connected()
        for old in olds:
            old.worker.drain()
        if pool_id == "pool":
            await self.drain(paused)
        else:
            paused.worker.requeue_all()
        self.go_on()

    async def upgrade_to_other_weights(self, paused: DeployedWorker) -> None:
        await self._add_pool("renewed", self.setting.num_blocks, version="2")
        await self.upgrade(paused, "renewed")

    async def evict(self) -> None:
        """Let another holder overwrite all blocks of the pool that are not retained."""
        arena, decode = self._pools["pool"][2], self.decoders[0].worker.worker_id
        stats = await self.store.stats("pool")
        new = stats.num_free + stats.num_cached - stats.num_retained
        found = await self.store.allocate("pool", "flood", decode, 1, (), new)
        arena[list(found.block_ids)] = float("nan")
        await self.store.release("pool", "flood", found.epoch)

    async def kill(self, paused: DeployedWorker) -> None:
        """Kill a paused worker after the step in flight, whose results reach neither gateway nor
        store."""
        for stream in self.streams(paused):
            stream.cut()
        await self.registry.withdraw(paused.worker.worker_id)
        paused.running.cancel()
        paused.worker.engine.send(None)  # no other step begins
        paused.forward.go_on()
        await asyncio.wait([paused.running])
        for pool_id in self._pools:
            await self.store.reap(pool_id, paused.worker.worker_id)
        await self.directory.refresh()
        self.go_on()
