"""Chaos: events disturb a deployment under load, and clients may see nothing but delays.

Audits run beside the events. From time to time the load pauses, all processes return, and nothing
may be held.
"""

import asyncio
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any, Protocol

from quire.async_client import AsyncClient
from tests.chaos.cases import cases, undisturbed
from tests.chaos.limits import END_S
from tests.chaos.load import User
from tests.chaos.operator import Operator
from tests.chaos.processes import Processes
from tests.chaos.redis_server import RedisServer
from tests.chaos.report import Report
from tests.chaos.schedule import KINDS, Event, schedule
from tests.e2e.deployment import serving

NUM_USERS, NUM_SLOW_USERS = 8, 2
NUM_GATEWAYS, NUM_PREFILL, NUM_DECODE = 2, 4, 5
MEMORY = ("--pool-memory", "16MiB", "--swap-memory", "8MiB")
"""About 330 blocks. The users' requests need more than that at once, so some are preempted."""

CALM_EVERY = 40
"""How many events there are between two pauses of the load."""

MAX_UNPROVEN = 4
"""How many events may wait for an audit that begins after them."""


class System(Protocol):
    """What events disturb."""

    async def suffer(self, event: Event) -> str: ...

    async def settle(self) -> None:
        """Wait until all processes are well, every event has had its audit, and nothing is held."""


class OneHost:
    """A `quire serve` and its Redis."""

    def __init__(self, processes: Processes, redis: RedisServer, operator: Operator) -> None:
        self._processes = processes
        self._redis = redis
        self._operator = operator

    async def suffer(self, event: Event) -> str:
        if event.role != "redis":
            return await self._processes.suffer(event)
        # One loss after another: what Redis lost is told again before it loses anything else.
        await self._redis.back()
        await self._operator.all_proven_but(0)
        return await self._redis.suffer(event)

    async def settle(self) -> None:
        await self._redis.back()
        await self._operator.all_proven_but(0)
        await self._processes.until_well()
        await self._operator.until_empty()
        await self._operator.happened()
        await self._operator.all_proven_but(0)


class Chaos:
    """A run. `calm`: while it is set, the users send nothing."""

    def __init__(
        self, system: System, operator: Operator, report: Report, calm: asyncio.Event
    ) -> None:
        self._system = system
        self._operator = operator
        self._report = report
        self._calm = calm
        self._over = asyncio.Event()

    async def run(self, users: Sequence[User], events: Iterator[Event], duration_s: float) -> None:
        """Run users and events. The first fault, which goes into the report, ends the run."""
        tally = self._report.tally
        asking = [asyncio.create_task(user.run(self._over, tally)) for user in users]
        auditing = asyncio.create_task(self._operator.watch())
        torment = asyncio.create_task(self._torment(asking, events, duration_s))
        try:
            await asyncio.wait({torment, auditing}, return_when=asyncio.FIRST_COMPLETED)
            for task in (torment, auditing):
                if task.done():
                    task.result()
        except (AssertionError, TimeoutError) as error:
            tally.faults.append(f"{type(error).__name__}: {error}")
        finally:
            for task in (torment, auditing, *asking):
                task.cancel()
            await asyncio.gather(torment, auditing, *asking, return_exceptions=True)

    async def _torment(
        self, asking: Sequence["asyncio.Task[None]"], events: Iterator[Event], duration_s: float
    ) -> None:
        loop, report = asyncio.get_running_loop(), self._report
        began = loop.time()
        for event in events:
            with report.spending("pauses"):
                await asyncio.sleep(event.pause_s)
            if report.tally.faults:
                return
            if loop.time() - began > duration_s:
                break
            with report.spending(f"waiting to hit {event.role}"):
                whom = await self._system.suffer(event)
            report.happened(event, whom, loop.time() - began)
            with report.spending("audits"):
                await self._operator.happened()
                await self._operator.all_proven_but(MAX_UNPROVEN)
            if report.kinds.total() % CALM_EVERY == 0:
                with report.spending("calm"):
                    self._calm.set()
                    await self._system.settle()
                    self._calm.clear()
        self._over.set()
        self._calm.set()
        async with asyncio.timeout(END_S):
            await asyncio.gather(*asking)
        await self._system.settle()
        report.lasted_s = loop.time() - began


async def unleash(
    directory: Path,
    seed: int,
    duration_s: float,
    kinds: Sequence[str] = KINDS,
    device: str = "cpu",
) -> Report:
    """Start a deployment, record the undisturbed answers, then disturb it for `duration_s`.
    `device`: cpu, or memfd:0, whose pool is kept like a GPU's."""
    report = Report(seed)
    workers = ("--prefill", str(NUM_PREFILL), "--decode", str(NUM_DECODE))
    async with AsyncExitStack() as stack:
        redis = stack.enter_context(closing(RedisServer(directory)))
        args = (*workers, *MEMORY, "--redis-url", redis.url, "--device", device)
        deployment = stack.enter_context(
            serving("embedded", directory, *args, num_gateways=NUM_GATEWAYS)
        )
        operator = Operator(deployment.operations)
        stack.push_async_callback(operator.close)
        processes = stack.enter_context(
            closing(Processes(deployment, operator, prefill=NUM_PREFILL, decode=NUM_DECODE))
        )
        system = OneHost(processes, redis, operator)
        events = schedule(seed, kinds)
        await disturb(report, deployment.address, operator, system, events, duration_s)
        report.read_log(deployment.log)
    return report


async def disturb(
    report: Report,
    addresses: str,
    operator: Operator,
    system: System,
    events: Iterator[Event],
    duration_s: float,
    num_cases: int | None = None,
) -> None:
    """Record a system's undisturbed answers, then disturb it for `duration_s`. `addresses`: of all
    gateways, with commas between them. `num_cases`: how many of the requests; None: all of them."""
    calm = asyncio.Event()
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(AsyncClient(_from(number, addresses)))
            for number in range(NUM_USERS + NUM_SLOW_USERS)
        ]
        known = await undisturbed(clients[0], cases(report.seed)[:num_cases])
        users = [
            User(
                f"{report.seed} {number}",
                client,
                [case for case in known if case.is_long is (number >= NUM_USERS)],
                calm,
                slow=number >= NUM_USERS,
            )
            for number, client in enumerate(clients)
            if number < NUM_USERS or num_cases is None
        ]
        await Chaos(system, operator, report, calm).run(users, events, duration_s)


def _from(number: int, addresses: str) -> str:
    """The addresses of all gateways, beginning with another one for each user."""
    every = addresses.split(",")
    first = number % len(every)
    return ",".join(every[first:] + every[:first])


def in_a_temporary_directory(
    unleashed: Callable[[Path], Coroutine[Any, Any, Report]], keep_log: Path | None
) -> Report:
    """Run in a temporary directory. `keep_log`: where the services' logs are copied at the end."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return asyncio.run(unleashed(Path(folder)))
        finally:
            if keep_log is not None:
                logs = [log.read_bytes() for log in sorted(Path(folder).glob("*.log"))]
                keep_log.write_bytes(b"".join(logs))
