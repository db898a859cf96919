"""The process of a worker: loads the model, joins a pool, serves gateways, leaves the pool."""

import asyncio
import gc
import sys
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from operator import attrgetter
from types import TracebackType
from typing import Any, NoReturn

from prometheus_client import CollectorRegistry

from blockstore.errors import PoolGone, UnknownWorker, WorkerFenced
from services.engine.device.opening import lost_device
from services.engine.forward import ForwardPass
from services.engine.runner import Runner
from services.pool.directory import PoolDirectory
from services.runtime.exposition import metrics_endpoint
from services.runtime.health import Health
from services.runtime.logging import get_logger
from services.runtime.metrics import WorkerMetrics
from services.runtime.rpc.proof import Guard
from services.runtime.rpc.tls import service_tls
from services.runtime.rpc.transport import RpcServer
from services.runtime.secret import deployment_secret
from services.runtime.ticks import until_tick
from services.runtime.tracing.opening import open_tracer
from services.worker.adapters import WorkerAdapters
from services.worker.config import WorkerSettings
from services.worker.cpu.place import Place, take_place
from services.worker.cpu.sharing import SharedCpus
from services.worker.drafting import speculation
from services.worker.grammars import Grammars
from services.worker.liveness.fence_guard import FenceGuard
from services.worker.liveness.registration import Registration
from services.worker.liveness.step_watch import end_process, watch_steps
from services.worker.loading import LoadedModel, load, new_runner
from services.worker.membership import Membership, join, join_swap_pool
from services.worker.pool_engine import WorkerParts
from services.worker.pool_worker import PoolWorker
from services.worker.roles import ROLES
from services.worker.stream import WorkerStream
from services.worker.swap.pool import Copy, SwapPool

# The next three add up to less than ENDING_S (services.runtime.config), the time for all
# that follows the grace period of the running requests.
_REQUEUE_LIMIT_S = 2.0
"""How long the steps in flight and the releases after it may take once the grace period is over."""

_LAST_MESSAGES_S = 0.1
"""How long the server waits, after all requests have ended, until its last messages are sent."""

_ABORT_LIMIT_S = 0.5
"""How long a leaving worker waits for the requests that end because their streams are closed."""

_SWITCH_INTERVAL_S = 0.0005
"""How long the engine thread waits for the GIL if the event loop is busy; the default is 5 ms."""

_DIVIDE_INTERVAL_S = 1.0

_NUM_WARM_UP_TOKENS = 32
"""Small: the longest prefill would take a second, to spare one prompt its page faults."""

log = get_logger(__name__)


class WorkerProcess:
    """Runs one worker after another in this process; only the place on the host and the loaded
    model outlive a worker."""

    def __init__(self, settings: WorkerSettings, stop: asyncio.Event) -> None:
        self._settings = settings
        self._stop = stop
        self._place: Place | None = None
        self._loaded: LoadedModel | None = None
        self._directory: PoolDirectory | None = None
        self._health: Health | None = None

    async def serve(self, registration: Registration) -> None:
        """Join the pool, serve until `stop` or until the worker is drained, leave.

        Raises the error if engine, pool or store are lost (PoolGone with the GPU), and WorkerFenced
        or UnknownWorker if the worker was fenced. When this returns or raises, no thread of the
        worker runs or writes any more, and its locks are dropped.
        """
        try:
            await self._serve(registration)
        except Exception as error:
            if (lost := lost_device(error)) is None:
                raise
            if self._directory is not None:
                self._directory.gone.touch(0o600)
            raise PoolGone(f"the GPU has lost the pool and this worker: {lost}") from error

    async def _serve(self, registration: Registration) -> None:
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self._health = Health()
        if self._place is None and self._settings.divides_cpus:
            self._place = take_place(self._settings, registration.worker_id)
        loaded = self._loaded = self._loaded or await self._load()
        if loaded is None:
            return
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as vital:
            pools = await self._join(registration, loaded, stack)
            worker, works = await self._make(loaded, pools, stack)
            tasks = [vital.create_task(work) for work in works]
            server, address = await self._listen(worker, stack)
            registration.set_serving(worker, address, loaded)
            await _wait_for_any(self._stop, worker.drain_asked)

            worker.drain()
            registration.heartbeat.changed()
            await _finish(worker, server, self._stop, self._settings.request_grace_s)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for pool in reversed(pools):
                await pool.leave()

    async def _join(
        self, registration: Registration, loaded: LoadedModel, stack: AsyncExitStack
    ) -> Sequence[Membership]:
        """Join the pool, and its swap pool if there is to be one; so do all ranks."""
        store, worker_id = registration.store, registration.worker_id
        own = await join(
            *(store, store.run_id, self._settings.pool_root, loaded.layout, worker_id, loaded.plan),
            memory=loaded.memory,
        )
        stack.callback(own.close)
        self._directory, pools = own.directory, [own]
        if loaded.swap_bytes is not None:
            pools.append(await join_swap_pool(own, loaded.swap_bytes, loaded.plan.arena))
            stack.callback(pools[-1].close)
        if loaded.ranks is not None:
            await asyncio.to_thread(loaded.ranks.join, pools, loaded.limits.max_num_seqs)
            stack.callback(loaded.ranks.leave)
        return pools

    async def _make(
        self, loaded: LoadedModel, pools: Sequence[Membership], stack: AsyncExitStack
    ) -> tuple[PoolWorker[Any], list[Coroutine[Any, Any, None]]]:
        """The worker, and all that has to run while it serves; an error of one ends the others."""
        settings, limits, own = self._settings, loaded.limits, pools[0]
        tracer = stack.enter_context(open_tracer(settings))
        registry = CollectorRegistry()
        stack.enter_context(metrics_endpoint(settings, registry, self._health))
        metrics, swap_pool = WorkerMetrics(registry), None
        guard = FenceGuard([one.lock for one in pools])
        for colder in pools[1:]:
            copies = _copies(loaded, own, colder)
            compares_costs = settings.preemption == "auto"
            swap_pool = SwapPool(
                own.store, own, colder, *copies, metrics, compares_costs, guard.check
            )
            stack.callback(swap_pool.close)
        grammars = Grammars(settings.model, limits.vocab_size, limits.eos_token_ids)
        grammars.warm_up()
        runner = await asyncio.to_thread(self._warm_runner, loaded, own)
        forward = self._share_cpus(runner, loaded, stack)
        launch_on = forward.launch_on if isinstance(forward, SharedCpus) else attrgetter("launch")
        load_adapter = loaded.ranks.adapters.load if loaded.ranks else loaded.model.load_adapter
        loras = loaded.model.whole_config, load_adapter, settings.max_loras, settings.max_lora_rank
        parts = WorkerParts(
            *(own.store, own, forward, limits, metrics, swap_pool),
            tracer=tracer,
            adapters=WorkerAdapters(*loras) if settings.max_loras else None,
            grammars=grammars,
            speculation=await asyncio.to_thread(speculation, settings, loaded.draft, launch_on),
            check_fence=guard.check,
        )
        worker = PoolWorker[Any](parts, ROLES[settings.service])
        engine, end = worker.engine, loaded.ranks.end_stuck if loaded.ranks else end_process
        watching = asyncio.create_task(
            watch_steps(lambda: engine.step_in_flight, settings.step_limit_s, end)
        )
        stack.callback(watching.cancel)  # called after the engine thread has ended
        works = [worker.run(), guard.watch(), own.watch_memory()]
        works += (one.complete_memory() for one in pools)
        if loaded.weights is not None and loaded.weights.kept is not None:
            works.append(loaded.weights.kept.keep())
        if isinstance(forward, SharedCpus):
            works.append(_refresh(forward))
        return worker, works

    async def _listen(
        self, worker: PoolWorker[Any], stack: AsyncExitStack
    ) -> tuple[RpcServer, str]:
        """Start the gRPC server; return it with the address at which gateways reach it."""
        settings, tls = self._settings, service_tls(self._settings)
        guard = Guard(deployment_secret(settings).rpc_key, worker.worker_id)
        stream = worker.role.stream
        server = RpcServer(stream.service_name, guard=guard, tls=tls, health=self._health)
        stream.add(WorkerStream(worker), server.aio)
        address = settings.address(await server.start(settings.host, settings.port))
        stack.push_async_exit(partial(_end_streams, worker, server))
        await server.set_serving(True)
        log.info(
            "worker_ready",
            worker_id=worker.worker_id,
            pool_id=worker.pool_id,
            num_blocks=worker.spec.num_blocks,
            address=address,
        )
        return server, address

    def _warm_runner(self, loaded: LoadedModel, own: Membership) -> Runner:
        """Make the runner, and compile, capture and touch all that steps need."""
        model, kv, max_rows = loaded.model, own.pool.kv, loaded.limits.max_num_seqs
        runner = new_runner(model, kv, loaded.layout.block_size, loaded.ops, loaded.ranks)
        runner.warm_up(_NUM_WARM_UP_TOKENS, max_rows)
        has_graphs = self._settings.service == "decode" and not self._settings.enforce_eager
        if model.device.type == "cuda" and has_graphs:
            runner.capture_graphs(max_rows)
        return runner

    def _share_cpus(
        self, runner: Runner, loaded: LoadedModel, stack: AsyncExitStack
    ) -> ForwardPass:
        """The forward pass on the worker's part of the host's CPUs, if the worker shares them."""
        native, place = loaded.ops.native, self._place
        if native is None or place is None:
            return runner
        stack.callback(place.cpu_board.set_backlog, 0)  # the engine may end in the middle of a step
        gap_ms = self._settings.max_gap_ms
        max_gap_s = None if gap_ms is None else gap_ms / 1000
        return SharedCpus(runner, native, place.cpu_board, place.entry, place.host, max_gap_s)

    async def _load(self) -> LoadedModel | None:
        """None if the process was stopped before the model was loaded."""

        def progress() -> None:
            if self._stop.is_set():
                raise _Stopped

        with suppress(_Stopped):
            loaded = await asyncio.to_thread(load, self._settings, progress, self._place)
            gc.collect()
            gc.freeze()  # otherwise each full collection visits torch's objects: a 0.1 s stall
            log.info("model_loaded", model=loaded.layout.model, **loaded.engine)
            return loaded
        return None


class _Stopped(Exception):
    pass


def _copies(loaded: LoadedModel, own: Membership, colder: Membership) -> tuple[Copy, Copy]:
    """The copies to the swap pool and back, of all ranks."""
    out: Copy = partial(colder.pool.copy_from, own.pool, loaded.ops)
    back: Copy = partial(own.pool.copy_from, colder.pool, loaded.ops)
    if loaded.ranks is not None:
        return loaded.ranks.swapping(out, out=True), loaded.ranks.swapping(back, out=False)
    return out, back


async def _refresh(forward: SharedCpus) -> NoReturn:
    while True:
        forward.refresh()
        await asyncio.sleep(until_tick(_DIVIDE_INTERVAL_S))


async def _finish(
    worker: PoolWorker[Any], server: RpcServer, stop: asyncio.Event, grace_s: float
) -> None:
    """Wait while requests finish or move to other workers: without limit for a drain, for `grace_s`
    after a stop. Then requeue the rest, to be computed again, and close all streams."""
    drained = asyncio.create_task(worker.drained())
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait([drained, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    await asyncio.wait([drained], timeout=grace_s)
    worker.role.requeue_all()
    await asyncio.wait([drained], timeout=_REQUEUE_LIMIT_S)
    worker.close_streams()
    await server.stop(_LAST_MESSAGES_S)
    with suppress(TimeoutError):
        await asyncio.wait_for(drained, _ABORT_LIMIT_S)


async def _end_streams(
    worker: PoolWorker[Any],
    server: RpcServer,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
) -> None:
    """Stop the server. A fenced worker closes its streams cleanly first, so that it counts
    as lost, not as crashed; any other error may have been caused by one of its requests."""
    given_up = (WorkerFenced, UnknownWorker)
    if isinstance(error, BaseExceptionGroup) and error.split(given_up)[1] is None:
        worker.close_streams()
        await server.stop(_LAST_MESSAGES_S)
    await server.stop()


async def _wait_for_any(*events: asyncio.Event) -> None:
    waiting = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
