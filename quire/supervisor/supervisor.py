"""The supervisor: starts a run, keeps it running, ends it, and leaves nothing behind."""

import asyncio
import os
import signal
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from quire.supervisor import topology, valkey
from quire.supervisor.banner import banner
from quire.supervisor.child import Child, ChildSpec, ChildState, Stage
from quire.supervisor.console import Console
from quire.supervisor.crowding import crowding
from quire.supervisor.descriptors import Listeners, ParentPipe
from quire.supervisor.errors import ServeError
from quire.supervisor.handover import Handover, execute, signals_kept, try_out
from quire.supervisor.model_source import check_model
from quire.supervisor.models import ModelOptions
from quire.supervisor.options import ServeOptions
from quire.supervisor.preflight import check_service, specs_to_check
from quire.supervisor.run_directory import RUNS, RunDirectory, RunRecord, claim
from quire.supervisor.worker_scaler import WorkerScaler

EXIT_S = 1.0
"""The most time that the exit of a process takes."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SIGNAL_S = 0.05
"""The most time until a signal that has come is handled."""


def serve(
    options: ServeOptions,
    models: Sequence[ModelOptions],
    runs: Path = RUNS,
    received: Handover | None = None,
) -> None:
    """Run a deployment until SIGINT, SIGTERM or SIGHUP, from its start or from where another
    supervisor was in this process. Raises ServeError if the deployment cannot start."""
    if received is not None and received.signals is None:
        _try_to_continue(options, models, received.run)
        return
    if received is not None:
        directory = RunDirectory(received.run, received.lock)
    else:
        record = RunRecord(
            os.getpid(),
            options.host,
            options.grpc_port,
            options.http_port,
            options.num_gateways,
            options.drain_time,
        )
        directory = claim(runs, record)
    try:
        asyncio.run(Supervisor(options, models, directory, Console(), received).run())
    finally:
        directory.remove()


def _try_to_continue(options: ServeOptions, models: Sequence[ModelOptions], run: Path) -> None:
    """Do what a supervisor does that takes the place of another one, without its services."""
    topology.services(options, models, run)
    topology.store(options, run)
    import_module("quire.supervisor.readiness")
    import_module("quire.supervisor.service")


class Supervisor:
    """Starts the services of one run, keeps them running, and ends them in order."""

    def __init__(
        self,
        options: ServeOptions,
        models: Sequence[ModelOptions],
        run_directory: RunDirectory,
        console: Console,
        received: Handover | None,
    ) -> None:
        """`received` is the state of the supervisor before this one, if there was one."""
        self._options = options
        self._models = models
        self._directory = run_directory.path
        self._lock = run_directory.lock
        self._console = console
        self._received = received
        self._log_format = "supervised" if console.is_terminal else "json"
        self._pipe = ParentPipe(received.pipe if received else None)
        self._listeners = Listeners(received.listeners if received else ())
        self._children: list[Child] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._stop = asyncio.Event()
        self._has_served = received is not None and received.has_served
        self._failure: BaseException | None = None

    async def run(self) -> None:
        for state in self._received.children if self._received else ():
            self._start(state.spec, state)
        self._listen_to_signals()
        scaler = WorkerScaler(
            self._children,
            self._start,
            topology.worker_groups(
                self._options, self._models, self._directory, log_format=self._log_format
            ),
            fewest=0 if self._options.shares_store else 1,
            warn_of=partial(crowding, is_on_gpu=self._options.is_on_gpu),
        )
        async with AsyncExitStack() as stack:
            bring_up = self._spawn(self._bring_up(scaler, stack))
            await self._stop.wait()
            bring_up.cancel()
        await self._take_down()
        if self._failure is not None:
            raise self._failure

    async def _bring_up(self, scaler: WorkerScaler, stack: AsyncExitStack) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        specs = topology.services(
            self._options, self._models, self._directory, log_format=self._log_format
        )
        store = topology.store(self._options, self._directory)
        if self._received is None:
            await self._start_all(store, specs)
        # gRPC is imported while the services start, which takes longer.
        await asyncio.to_thread(import_module, "quire.supervisor.readiness")
        from quire.supervisor.readiness import wait_until_serving
        from quire.supervisor.roles import Roles
        from quire.supervisor.service import served
        from quire.supervisor.upgrade import Upgrader

        roles = Roles(self._children, self._directory)
        by_name = {spec.name: spec for spec in (*specs, *((store,) if store else ()))}
        upgrader = Upgrader(
            self._children,
            self._start,
            scaler,
            roles,
            self._directory,
            by_name,
            hand_over=self._hand_over,
        )
        if self._received is not None:
            upgrader.resume()
        await stack.enter_async_context(served(scaler, upgrader, roles, self._directory))
        if self._has_served:
            return
        serving = await wait_until_serving(
            self._directory,
            self._models,
            self._console.note,
            has_others=self._options.shares_store,
        )
        self._has_served = True
        self._console.note(banner(self._options, serving, loop.time() - started))

    async def _start_all(self, store: ChildSpec | None, specs: Sequence[ChildSpec]) -> None:
        if warning := self._crowding():
            self._console.note(f"warning: {warning}")
        # Valkey starts beside the checks, because its start waits more than it computes.
        (self._directory / "pools").mkdir(mode=0o700)  # the checks ask how much fits there
        checks = [asyncio.to_thread(check_model, model.path) for model in self._models]
        checks += [
            asyncio.to_thread(check_service, spec) for spec in specs_to_check(self._options, specs)
        ]
        checking = [self._spawn(check) for check in checks]
        if store is not None:
            self._start(store)
            await valkey.wait_until_answering(self._directory)
        await asyncio.gather(*checking)
        names = ", ".join(model.name for model in self._models)
        self._console.note(f"Quire starts {names} in {self._directory}")
        for spec in specs:
            self._start(spec)

    async def _hand_over(self) -> None:
        """Let the installed version take this supervisor's place. Raises ServeError if it cannot;
        returns only if the run ends meanwhile."""
        try:
            await asyncio.to_thread(try_out, self._state(None))
            with signals_kept(_SIGNALS) as signals:
                await asyncio.sleep(_SIGNAL_S)  # for those that came before
                if not self._stop.is_set():
                    self._console.note("the supervisor becomes the installed version")
                    execute(self._state(signals))
        except ServeError as error:
            raise ServeError(
                f"nothing is replaced, because the supervisor stays: {error}"
            ) from error

    def _state(self, signals: int | None) -> Handover:
        return Handover(
            self._directory,
            self._lock,
            self._pipe.descriptors,
            self._listeners.descriptors,
            tuple(child.state for child in self._children),
            self._options.grpc_port,
            self._options.http_port,
            self._has_served,
            signals,
        )

    def _crowding(self) -> str:
        """A warning if there are many workers. Raises ServeError if there are too many."""
        num_workers = sum(model.num_prefill + model.num_decode for model in self._models)
        try:
            return crowding(num_workers, is_on_gpu=self._options.is_on_gpu)
        except ValueError as error:
            raise ServeError(str(error)) from error

    def _start(self, spec: ChildSpec, state: ChildState | None = None) -> Child:
        child = Child(
            spec, self._pipe, self._listeners, self._console, is_steady=lambda: self._has_served
        )
        if state is not None:
            child.adopt(state)
        self._children.append(child)
        self._spawn(child.run())
        return child

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start `work` as a task; the first task that fails ends the run."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._on_end)
        self._tasks.append(task)
        return task

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self._stop.set()

    async def _take_down(self) -> None:
        """End all services, stage by stage: each ends before the services on which it depends."""
        self._listeners.close()
        grace_s = self._options.stop_grace_s + EXIT_S
        for stage in sorted(Stage, reverse=True):
            ending = [child for child in self._children if child.spec.stage is stage]
            await asyncio.gather(*(child.stop(grace_s) for child in ending))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._pipe.close()

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        if self._received is not None and self._received.signals is not None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            for _ in os.read(self._received.signals, 64):
                self._on_signal()
            os.close(self._received.signals)

    def _on_signal(self) -> None:
        """The first signal ends the run in order, a second one kills all services."""
        if not self._stop.is_set():
            self._console.note(
                f"ending: running requests may go on for {self._options.drain_time:g} s "
                "(--drain-time)"
            )
            self._console.note("once more ends all at once, in the middle of their answers")
            self._stop.set()
            return
        for child in self._children:
            child.kill()
