"""The process of a worker: loads the model, joins a pool, serves gateways, leaves the pool."""

import asyncio
import gc
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from types import TracebackType
from typing import Any

from blockstore.errors import PoolGone, UnknownWorker, WorkerFenced
from blockstore.registry import Role as RoleName
from services.engine.device.opening import lost_device
from services.pool.directory import PoolDirectory
from services.protocol.worker_stream import RELOAD
from services.runtime.health import Health
from services.runtime.logging import get_logger
from services.runtime.rpc.proof import Guard
from services.runtime.rpc.tls import service_tls
from services.runtime.rpc.transport import RpcServer
from services.runtime.secret import deployment_secret
from services.worker.config import WorkerSettings
from services.worker.cpu.place import Place, take_place
from services.worker.cpu.sharing import SharedCpus
from services.worker.liveness.registration import Registration
from services.worker.liveness.step_watch import end_process, watch_steps
from services.worker.loading import LoadedModel, load
from services.worker.membership import Membership, join, join_swap_pool
from services.worker.new_weights import read_again
from services.worker.parts import make_parts
from services.worker.pool_engine import WorkerParts
from services.worker.pool_worker import PoolWorker
from services.worker.ranks.processes import end_worker
from services.worker.roles import ROLES
from services.worker.roles.prefill import Prefill
from services.worker.stream import WorkerStream

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

_NUM_OTHERS_CHECKS, _OTHERS_CHECK_S = 1500, 0.02
"""A worker that reloads looks so often, 30 s in all, whether the others have left the pool."""

log = get_logger(__name__)


class WorkerProcess:
    """Runs one worker after another in this process; only the role, the place on the host and the
    loaded model outlive a worker. A worker that changes its role stays the same one: it keeps its
    id, its pool and all other parts that are not the role's. A worker that reloads leaves, and the
    next one serves the new weights."""

    def __init__(self, settings: WorkerSettings, stop: asyncio.Event) -> None:
        self.role: RoleName = settings.role
        """The role that the worker has, or is about to take; a worker that rejoins takes it too."""
        self._settings = settings
        self._stop = stop
        self._place: Place | None = None
        self._loaded: LoadedModel | None = None
        self._next: LoadedModel | None = None
        """Other weights of the model, which were read while the worker serves."""
        self._directory: PoolDirectory | None = None
        self._health: Health | None = None

    async def serve(self, registration: Registration, *, reloads: bool = False) -> None:
        """Join the pool, serve until `stop` or until the worker is drained, leave. `reloads` says
        that the worker before has left for the weights that were read.

        Raises the error if engine, pool or store are lost (PoolGone with the GPU), and WorkerFenced
        or UnknownWorker if the worker was fenced. When this returns or raises, no thread of the
        worker runs or writes any more, and its locks are dropped.
        """
        try:
            if reloads and self._next is not None:
                await self._take_new_weights()
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
        if self._loaded is None:
            self._loaded = await self._read(partial(load, self._settings, place=self._place))
        if (loaded := self._loaded) is None:
            return
        gc.collect()
        gc.freeze()  # otherwise each full collection visits torch's objects: a 0.1 s stall
        async with (
            AsyncExitStack() as stack,
            AsyncExitStack() as of_role,
            asyncio.TaskGroup() as vital,
        ):
            pools = await self._join(registration, loaded, stack)
            parts, works = await make_parts(
                self._settings, loaded, pools, self._place, self._health, stack
            )
            tasks = [vital.create_task(work) for work in works]
            serving = registration, loaded, parts, vital, of_role
            while (next_role := await self._serve_in_role(*serving)) is not None:
                log.info("role_changes", worker_id=registration.worker_id, role=next_role)
                self.role = next_role
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
            store,
            store.run_id,
            self._settings.pool_root,
            loaded.layout,
            worker_id,
            loaded.plan,
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

    async def _serve_in_role(
        self,
        registration: Registration,
        loaded: LoadedModel,
        parts: WorkerParts,
        vital: asyncio.TaskGroup,
        stack: AsyncExitStack,
    ) -> RoleName | None:
        """Serve in `role` until `stop` or until the worker is drained. Returns the role that it is
        to take next; None if it is to leave. `stack` closes what belongs to this role only."""
        if isinstance(parts.forward, SharedCpus):  # no step is in flight
            await asyncio.to_thread(parts.forward.change_role, self.role)
        mixes = self._settings.mix and self.role == "decode"
        worker = PoolWorker[Any](parts, ROLES[self.role], [Prefill] if mixes else [])
        engine, end = worker.engine, loaded.ranks.end_stuck if loaded.ranks else end_process
        watching = asyncio.create_task(
            watch_steps(lambda: engine.step_in_flight, self._settings.step_limit_s, end)
        )
        stack.callback(watching.cancel)  # called after the engine thread has ended
        running = vital.create_task(worker.run())
        server, address = await self._listen(worker, stack)
        registration.set_serving(worker, self.role, address, loaded)
        await _wait_for_any(self._stop, worker.drain_asked)

        if not worker.draining:
            worker.drain()
        registration.heartbeat.changed()
        await _finish(worker, server, self._stop, self._settings.request_grace_s)
        running.cancel()
        await asyncio.wait([running])
        await stack.aclose()
        next_role = worker.next_role
        return None if self._stop.is_set() or next_role == RELOAD else next_role

    async def _listen(
        self, worker: PoolWorker[Any], stack: AsyncExitStack
    ) -> tuple[RpcServer, str]:
        """Start the gRPC server; return it with the address at which gateways reach it."""
        settings, tls = self._settings, service_tls(self._settings)
        guard = Guard(deployment_secret(settings).rpc_key, worker.worker_id)
        names = [role.stream.service_name for role in worker.roles]
        server = RpcServer(*names, guard=guard, tls=tls, health=self._health)
        for role in worker.roles:
            role.stream.add(WorkerStream(worker, self._read_weights, role), server.aio)
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

    async def _read(self, read: Callable[..., LoadedModel | None]) -> LoadedModel | None:
        """Load a model in a thread. None if the process was stopped before the model was loaded."""

        def progress() -> None:
            if self._stop.is_set():
                raise _Stopped

        with suppress(_Stopped):
            loaded = await asyncio.to_thread(read, progress=progress)
            if loaded is not None:
                log.info("model_loaded", model=loaded.layout.model, **loaded.engine)
            return loaded
        return None

    async def _read_weights(self) -> bool:
        """Read the weights again while the worker serves. Returns whether they are others. Raises
        InvalidRequest."""
        assert self._loaded is not None
        if self._next is not None and self._next.ranks is not None:  # another worker had refused
            await asyncio.to_thread(self._next.ranks.close)
        self._next = None
        read = partial(read_again, self._settings, self._loaded, place=self._place)
        self._next = await self._read(read)
        return self._next is not None

    async def _take_new_weights(self) -> None:
        """Put the new weights in the place of the old ones, once the others have left the old pool:
        the new pool takes its memory."""
        assert self._directory is not None
        for _ in range(_NUM_OTHERS_CHECKS):
            if not self._directory.is_live():
                break
            await asyncio.sleep(_OTHERS_CHECK_S)
        if self._loaded and self._loaded.weights and self._loaded.weights.kept:
            self._loaded.weights.kept.close()
        if self._loaded and self._loaded.ranks:
            gc.collect()  # CUDA graphs of the old steps, before the connection that they use ends
            await asyncio.to_thread(self._loaded.ranks.close)
        if self._next and self._next.ranks:
            self._next.ranks.on_end = end_worker
        self._loaded, self._next = self._next, None


class _Stopped(Exception):
    pass


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
    worker.requeue_all()
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
