"""A worker's process: load the model, join a pool, serve gateways, leave."""

import asyncio
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from prometheus_client import CollectorRegistry

from blockstore.redis_store import RedisStore
from blockstore.registry import Member, Role, State
from blockstore.store import BlockStore
from services.common import redis
from services.common.board import Board
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
from services.worker.lanes import SharedCpus
from services.worker.loading import LoadedModel, load
from services.worker.pool_worker import Limits, PoolWorker

_ABORT_LIMIT_S = 5.0
"""How long a worker that leaves waits for its last step and releases."""

_SWITCH_INTERVAL_S = 0.0005
"""The engine's thread comes back from a step for the interpreter's lock; by default it would wait
5 ms for an event loop that is busy."""

_DIVIDE_INTERVAL_S = 0.2

_NUM_WARM_UP_TOKENS = 32
"""The longest prefill would take a second of all cores, and save the first one its page faults."""

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
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as vital:
        store, registry = await redis.connect(settings, stack)
        entry = _Entry(role, settings)
        presence = Presence(registry, entry.describe)
        announcing = vital.create_task(presence.keep())

        loaded = await _load(settings, stop)
        if loaded is None:
            announcing.cancel()
            return
        log.info("model_loaded", model=loaded.layout.model, **loaded.engine)
        membership = await _join(store, settings, loaded, entry)
        metrics = CollectorRegistry()
        stack.enter_context(metrics_endpoint(settings, metrics))
        runner = await _warm(loaded, membership)
        forward = _on_its_cpus(runner, loaded, settings, entry, stack)
        worker = role.make(store, membership, forward, loaded.limits, WorkerMetrics(metrics))
        working = [worker.run(), membership.complete_memory()]
        if isinstance(forward, SharedCpus):
            working.append(_refresh(forward))
        tasks = [vital.create_task(work) for work in working]
        server, address = await _listen(role, settings, worker)
        entry.serves(worker, address, loaded)
        presence.changed()
        await _either(stop, worker.drain_asked)

        worker.drain()
        presence.changed()
        await _finish(worker, server, stop, settings.drain_grace_s)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await membership.leave()
        announcing.cancel()


class _Stopped(Exception):
    pass


async def _load(settings: WorkerSettings, stop: asyncio.Event) -> LoadedModel | None:
    """None: stopped before it was done."""

    def progress() -> None:
        if stop.is_set():
            raise _Stopped

    with suppress(_Stopped):
        return await asyncio.to_thread(load, settings, progress)
    return None


async def _join(
    store: RedisStore, settings: WorkerSettings, loaded: LoadedModel, entry: _Entry
) -> Membership:
    worker_id = entry.member.member_id
    return await join(
        store, store.run_id, settings.pool_root, loaded.layout, worker_id, loaded.plan
    )


async def _warm(loaded: LoadedModel, membership: Membership) -> Runner:
    """Having gone through every weight and every operation once."""
    runner = Runner(loaded.model, membership.pool.kv, loaded.layout.block_size)
    await asyncio.to_thread(runner.warm_up, _NUM_WARM_UP_TOKENS)
    return runner


def _on_its_cpus(
    runner: Runner,
    loaded: LoadedModel,
    settings: WorkerSettings,
    entry: _Entry,
    stack: AsyncExitStack,
) -> ForwardPass:
    native, cpus = loaded.native, settings.divided_cpus
    if native is None or not cpus:
        return runner
    board = Board(settings.pool_root / "board")
    stack.callback(board.leave)
    own = board.sit_down(entry.member.role, entry.member.member_id)
    return SharedCpus(runner, native, board, own, cpus)


async def _refresh(forward: SharedCpus) -> NoReturn:
    while True:
        forward.refresh()
        await asyncio.sleep(_DIVIDE_INTERVAL_S)


async def _listen(
    role: WorkerRole, settings: WorkerSettings, worker: PoolWorker
) -> tuple[RpcServer, str]:
    """Ready for gateways; the address that they reach it by."""
    server = RpcServer(role.service_name)
    role.serve(worker, server)
    address = settings.address(await server.start(settings.host, settings.port))
    await server.set_serving(True)
    log.info(
        "worker_ready",
        worker_id=worker.worker_id,
        pool_id=worker.pool_id,
        num_blocks=worker.spec.num_blocks,
        address=address,
    )
    return server, address


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
