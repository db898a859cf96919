"""A worker's process: load the model, join a pool, serve gateways, leave."""

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

from prometheus_client import CollectorRegistry

from blockstore.registry import Member, Role, State
from blockstore.store import BlockStore
from services.common import redis
from services.common.logging import get_logger
from services.common.metrics import WorkerMetrics, metrics_endpoint
from services.common.pool.names import new_worker_id
from services.common.presence import Presence
from services.common.rpc import RpcServer
from services.common.version import PROTOCOL_VERSION
from services.engine.engine import ForwardPass
from services.engine.membership import Membership, join
from services.engine.runner import Runner
from services.worker.config import WorkerSettings
from services.worker.loading import LoadedModel, load
from services.worker.pool_worker import Limits, PoolWorker

_ABORT_LIMIT_S = 5.0
"""How long a worker that leaves waits for its last step and releases."""

log = get_logger(__name__)

MakeWorker = Callable[[BlockStore, Membership, ForwardPass, Limits, WorkerMetrics], PoolWorker]


@dataclass(frozen=True, slots=True)
class WorkerRole:
    """What differs between a prefill and a decode worker's process. `serve(worker, server)` adds
    the role's gRPC service, `service_name`, to the server."""

    role: Role
    service_name: str
    make: MakeWorker
    serve: Callable[[Any, RpcServer], None]


class _Entry:
    """The worker's entry in the registry, as it is at any moment."""

    def __init__(self, role: WorkerRole, settings: WorkerSettings) -> None:
        self.worker: PoolWorker | None = None
        self.member = Member(
            member_id=new_worker_id(role.role),
            role=role.role,
            address="",
            state="starting",
            started_unix_ms=time.time_ns() // 1_000_000,
            protocol_version=PROTOCOL_VERSION,
            model=settings.served_name,
            model_dir=str(settings.model.resolve()),
        )

    def serves(self, worker: PoolWorker, address: str, loaded: LoadedModel) -> None:
        self.worker = worker
        self.member = replace(
            self.member,
            address=address,
            state="serving",
            pool_id=worker.pool_id,
            max_model_len=loaded.limits.max_model_len,
            max_num_seqs=loaded.limits.max_num_seqs,
            engine=loaded.engine,
        )

    def describe(self) -> Member:
        if self.worker is None:
            return self.member
        state: State = "draining" if self.worker.draining else "serving"
        return replace(self.member, state=state, load=self.worker.load())


async def serve_worker(role: WorkerRole, settings: WorkerSettings, stop: asyncio.Event) -> None:
    """Until `stop`, or until it is drained. Raises when engine, pool or store are lost."""
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as vital:
        store, registry = await redis.connect(settings, stack)
        entry = _Entry(role, settings)
        presence = Presence(registry, entry.describe)
        announcing = vital.create_task(presence.keep())

        loaded = await asyncio.to_thread(load, settings)
        membership = await join(
            store,
            store.run_id,
            settings.pool_root,
            loaded.layout,
            entry.member.member_id,
            loaded.plan,
        )
        metrics = CollectorRegistry()
        stack.enter_context(metrics_endpoint(settings, metrics))
        runner = Runner(loaded.model, membership.pool.kv, settings.block_size)
        await asyncio.to_thread(runner.warm_up, loaded.limits.max_num_batched_tokens)
        worker = role.make(store, membership, runner, loaded.limits, WorkerMetrics(metrics))
        working = vital.create_task(worker.run())

        server = RpcServer(role.service_name)
        role.serve(worker, server)
        port = await server.start(settings.host, settings.port)
        entry.serves(worker, settings.address(port), loaded)
        presence.changed()
        await server.set_serving(True)
        log.info(
            "worker_ready",
            worker_id=worker.worker_id,
            pool_id=worker.pool_id,
            address=entry.member.address,
            num_blocks=worker.spec.num_blocks,
            **loaded.engine,
        )
        await _either(stop, worker.drain_asked)

        worker.drain()
        presence.changed()
        await _finish(worker, server, stop, settings.drain_grace_s)
        working.cancel()
        await asyncio.wait([working])
        del runner  # It views the pool's memory.
        await membership.leave()
        announcing.cancel()


async def _finish(
    worker: PoolWorker, server: RpcServer, stop: asyncio.Event, grace_s: float
) -> None:
    """Let what runs end: without limit while drained, for the grace period once stopped. Then the
    streams break, which aborts what is left."""
    drained = asyncio.create_task(worker.drained())
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait([drained, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    await asyncio.wait([drained], timeout=grace_s)
    await server.stop()
    with suppress(TimeoutError):
        await asyncio.wait_for(drained, _ABORT_LIMIT_S)


async def _either(*events: asyncio.Event) -> None:
    waiting = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
