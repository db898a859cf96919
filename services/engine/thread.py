"""The engine thread: the only one that touches the device, the sequences and the stamps."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

from services.engine.engine import Engine
from services.engine.messages import Admit, Command, Start, StepOutcome


class EngineThread:
    """Runs the engine's steps in a thread of its own; waits for commands while nothing can run and
    nothing is in flight.

    `on_outcome` and `on_failure` are called in `loop`, outcomes in the order of the steps. Groups
    removed before a step are reported before it, so that their release does not wait for the step.
    After a failure the thread ends: the blocks of the steps in flight are in an unknown state, so
    the worker has to end too.
    """

    def __init__(
        self,
        engine: Engine,
        loop: asyncio.AbstractEventLoop,
        on_outcome: Callable[[StepOutcome], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._engine = engine
        self._loop = loop
        self._on_outcome = on_outcome
        self._on_failure = on_failure
        self.step_in_flight: int | None = None
        """The number of the step that runs now, from 1; 0: the thread ends and waits for the steps
        in flight; None between steps."""
        self._unsent: list[Command] = []
        self._inbox: queue.SimpleQueue[Seq[Command] | None] = queue.SimpleQueue()
        self._new_groups = threading.Event()  # set while the inbox may hold groups to begin
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, command: Command) -> None:
        """Send a command to the thread; to be called in `loop`.

        An `Admit` of a group that is not started is held back until the next command: it gives the
        thread nothing to do, and a thread that wakes up competes with the loop for the GIL.
        """
        self._unsent.append(command)
        if not isinstance(command, Admit) or command.is_started:
            unsent, self._unsent = self._unsent, []
            self._inbox.put(unsent)
            if isinstance(command, Admit | Start):
                self._new_groups.set()

    def stop(self) -> None:
        """End the thread once no step is in flight; commands that it has not taken are dropped."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            try:
                self._run_steps()
            finally:
                self.step_in_flight = 0
                self._engine.settle()  # the device writes no block after the thread's end
                self.step_in_flight = None
        except BaseException as error:
            self._loop.call_soon_threadsafe(self._on_failure, error)

    def _run_steps(self) -> None:
        busy, number = False, 0
        while (commands := self._take(wait=not busy)) is not None:
            self.step_in_flight = number = number + 1
            self._apply(commands)
            if not self._wait_for_more():
                return
            outcome = self._engine.step()
            self.step_in_flight = None
            busy = outcome.is_busy
            self._send_outcome(outcome)
            if busy and not self._new_groups.is_set():
                self._engine.yield_device(self._new_groups.wait)

    def _apply(self, commands: Seq[Command]) -> None:
        self._send_outcome(StepOutcome(self._engine.apply(commands)))

    def _wait_for_more(self) -> bool:
        """Apply the commands that arrive while the step may still wait; False: stop the thread."""
        began = time.perf_counter()
        while delay_s := self._engine.delay_s(time.perf_counter() - began):
            try:
                sent = self._inbox.get(timeout=delay_s)
            except queue.Empty:
                break
            if sent is None:
                return False
            self._apply(sent)
        return True

    def _send_outcome(self, outcome: StepOutcome) -> None:
        if outcome.has_results:
            self._loop.call_soon_threadsafe(self._on_outcome, outcome)

    def _take(self, wait: bool) -> list[Command] | None:
        """Return all commands in the inbox, or None to stop the thread. With `wait`, wait for the
        first one."""
        self._new_groups.clear()
        commands: list[Command] = []
        while True:
            try:
                sent = self._inbox.get(block=wait and not commands)
            except queue.Empty:
                return commands
            if sent is None:
                return None
            commands += sent
