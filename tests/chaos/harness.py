"""Chaos: inject faults into a deployment under load. Clients may see nothing but delays.

Audits run beside the faults. From time to time the load pauses, all processes return, and no block
may be held.
"""

import asyncio
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, closing, suppress
from itertools import cycle
from pathlib import Path
from typing import Any, Protocol

import httpx

from quire.async_client import AsyncClient
from tests.chaos.cases import SHARED_PREFIX, cases_of, with_outputs
from tests.chaos.limits import LAST_STREAMS_S, RECOVERY_S, UPGRADE_S
from tests.chaos.load import User
from tests.chaos.model import chaos_model
from tests.chaos.operator import Operator
from tests.chaos.processes import Processes
from tests.chaos.redis_server import RedisServer
from tests.chaos.report import Report
from tests.chaos.schedule import FAULT_KINDS, Fault, schedule
from tests.e2e.deployment import serving
from tests.e2e.weights import other_bytes, point
from tests.waiting import until

NUM_USERS, NUM_SLOW_USERS = 8, 2
NUM_GATEWAYS, NUM_PREFILL, NUM_DECODE = 2, 4, 5
MEMORY = ("--pool-memory", "16MiB", "--swap-memory", "8MiB")
"""About 330 blocks. The users' requests need more than that at once, so some are preempted."""

FAULTS_BETWEEN_PAUSES = 40
"""How many faults there are between two pauses of the load."""

RETAIN_LIMIT_S = 5.0
"""How long a fault waits for a prefix to be computed and retained."""

MAX_UNAUDITED = 4
"""How many faults may wait for an audit that begins after them."""


class System(Protocol):
    """A deployment into which faults are injected."""

    async def inject(self, fault: Fault) -> str:
        """Inject a fault; returns what it hit."""

    async def until_recovered(self) -> None:
        """Wait until all processes are healthy, an audit followed every fault, and no block is
        held."""


class OneHost:
    """A `quire serve` and its Redis."""

    def __init__(
        self,
        processes: Processes,
        redis: RedisServer,
        operator: Operator,
        http: str,
        link: Path,
        checkpoints: Sequence[Path],
    ) -> None:
        self._http = http
        self._processes = processes
        self._redis = redis
        self._operator = operator
        self._link = link
        self._checkpoints = cycle(checkpoints)
        self._reloading: asyncio.Task[object] | None = None
        self._was_disturbed = False
        """Whether a fault has hit the deployment since the reload began."""

    async def inject(self, fault: Fault) -> str:
        if self._was_disturbed:
            await self._until_reloaded()
        self._was_disturbed = True
        if fault.verb == "reload":
            return await self._reload()
        if fault.verb == "retain":
            return await self._retain(fault)
        if fault.role != "redis":
            return await self._processes.inject(fault)
        # One loss after another: the workers have told Redis again what it lost last time.
        await self._redis.until_running()
        await self._operator.until_audited(0)
        return await self._redis.inject(fault)

    async def _retain(self, fault: Fault) -> str:
        """Compute and retain a prefix under one of four names, for ten times the fault's length.
        Together they have more blocks than the pool retains."""
        number = 1 + int(4 * fault.which)
        body = {"name": f"p{number}", "ttl": round(10 * fault.length_s)}
        body["prompt"] = f"{number} {SHARED_PREFIX * 2 * number}"
        with suppress(httpx.TransportError):  # its gateway dies, or it takes too long
            async with httpx.AsyncClient(timeout=RETAIN_LIMIT_S, trust_env=False) as client:
                answer = await client.post(f"{self._http}/v1/cache", json=body)
            assert answer.status_code in (200, 503), answer.text
            return f"p{number}: {answer.json().get('status', answer.text)}"
        return f"p{number}: no answer"

    async def _reload(self) -> str:
        """Begin to serve the other checkpoint, which has the same weights. The next fault hits the
        deployment meanwhile. The fault after that waits until all workers serve the checkpoint,
        since no reload succeeds while a worker starts."""
        await self._until_reloaded()
        await self._processes.until_healthy()
        point(self._link, checkpoint := next(self._checkpoints))
        self._was_disturbed = False
        self._reloading = asyncio.create_task(
            until(
                lambda: self._operator.call(AsyncClient.reload, limit_s=RECOVERY_S),
                lambda worker_ids: worker_ids is not None,
                limit_s=UPGRADE_S,
                explain=lambda: "no reload succeeded",
            )
        )
        return checkpoint.name

    async def _until_reloaded(self) -> None:
        if self._reloading is not None:
            await self._reloading

    async def until_recovered(self) -> None:
        await self._redis.until_running()
        await self._operator.until_audited(0)
        await self._until_reloaded()
        await self._processes.until_healthy()
        await self._operator.until_nothing_held()
        await self._operator.note_fault()
        await self._operator.until_audited(0)


class Chaos:
    """A run. `paused`: while it is set, the users send no new requests."""

    def __init__(
        self, system: System, operator: Operator, report: Report, paused: asyncio.Event
    ) -> None:
        self._system = system
        self._operator = operator
        self._report = report
        self._paused = paused
        self._ended = asyncio.Event()

    async def run(
        self, users: Sequence[User], faults: Iterator[Fault], duration_s: float | None
    ) -> None:
        """Run users and inject faults. The first violation, which goes into the report, ends the
        run."""
        tally = self._report.tally
        sending = [asyncio.create_task(user.run(self._ended, tally)) for user in users]
        auditing = asyncio.create_task(self._operator.audit_forever())
        injecting = asyncio.create_task(self._inject_faults(sending, faults, duration_s))
        try:
            await asyncio.wait({injecting, auditing}, return_when=asyncio.FIRST_COMPLETED)
            for task in (injecting, auditing):
                if task.done():
                    task.result()
        except (AssertionError, TimeoutError) as error:
            tally.violations.append(f"{type(error).__name__}: {error}")
        finally:
            for task in (injecting, auditing, *sending):
                task.cancel()
            await asyncio.gather(injecting, auditing, *sending, return_exceptions=True)

    async def _inject_faults(
        self,
        sending: Sequence["asyncio.Task[None]"],
        faults: Iterator[Fault],
        duration_s: float | None,
    ) -> None:
        loop, report = asyncio.get_running_loop(), self._report
        began = loop.time()
        for fault in faults:
            with report.timing("pauses between faults"):
                await asyncio.sleep(fault.pause_s)
            if report.tally.violations:
                return
            if duration_s is not None and loop.time() - began > duration_s:
                break
            with report.timing(f"injecting into {fault.role}"):
                target = await self._system.inject(fault)
            report.record(fault, target, loop.time() - began)
            with report.timing("audits"):
                await self._operator.note_fault()
                await self._operator.until_audited(MAX_UNAUDITED)
            if report.kinds.total() % FAULTS_BETWEEN_PAUSES == 0:
                with report.timing("pauses of the load"):
                    self._paused.set()
                    await self._system.until_recovered()
                    self._paused.clear()
        self._ended.set()
        self._paused.set()
        async with asyncio.timeout(LAST_STREAMS_S):
            await asyncio.gather(*sending)
        await self._system.until_recovered()
        report.duration_s = loop.time() - began


async def run_chaos(
    directory: Path,
    seed: int,
    duration_s: float | None,
    kinds: Sequence[str] = FAULT_KINDS,
    device: str = "cpu",
    num_cases: int | None = None,
) -> Report:
    """Start a deployment, record the undisturbed outputs, then inject faults for `duration_s`; with
    None, one fault of each kind. `device` is cpu, or memfd:0, whose pool is kept like a GPU's.
    Blocks are kept in files, too. `num_cases` is as for `inject_faults`."""
    report = Report(seed)
    workers = ("--prefill", str(NUM_PREFILL), "--decode", str(NUM_DECODE))
    async with AsyncExitStack() as stack:
        redis = stack.enter_context(closing(RedisServer(directory)))
        files = "--cache-directory", str(directory / "cache")
        args = (*workers, *MEMORY, *files, "--redis-url", redis.url, "--device", device)
        model, link = chaos_model(directory), directory / "served"
        link.symlink_to(model)
        deployment = stack.enter_context(serving(link, directory, *args, num_gateways=NUM_GATEWAYS))
        operator = Operator(deployment.operations)
        stack.push_async_callback(operator.close)
        processes = stack.enter_context(
            closing(Processes(deployment, operator, prefill=NUM_PREFILL, decode=NUM_DECODE))
        )
        checkpoints = other_bytes(model, directory / "other"), model
        system = OneHost(processes, redis, operator, deployment.http, link, checkpoints)
        faults = schedule(seed, kinds, once=duration_s is None)
        await inject_faults(
            report, deployment.address, operator, system, faults, duration_s, num_cases
        )
        report.read_log(deployment.log)
    return report


async def inject_faults(
    report: Report,
    addresses: str,
    operator: Operator,
    system: System,
    faults: Iterator[Fault],
    duration_s: float | None,
    num_cases: int | None = None,
) -> None:
    """Record a system's undisturbed outputs, then inject faults for `duration_s`; None: all of
    `faults`. `addresses`: of all gateways, with commas between them. `num_cases`: how many of the
    requests, without users that do not read; None: all."""
    paused = asyncio.Event()
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(AsyncClient(_rotated(number, addresses)))
            for number in range(NUM_USERS + NUM_SLOW_USERS)
        ]
        cases = await with_outputs(clients[0], cases_of(report.seed)[:num_cases])
        users = [
            User(
                f"{report.seed} {number}",
                client,
                [case for case in cases if case.is_long is (number >= NUM_USERS)],
                paused,
                slow=number >= NUM_USERS,
            )
            for number, client in enumerate(clients)
            if number < NUM_USERS or num_cases is None
        ]
        await Chaos(system, operator, report, paused).run(users, faults, duration_s)


def _rotated(number: int, addresses: str) -> str:
    """The addresses of all gateways, beginning with another one for each user."""
    every = addresses.split(",")
    first = number % len(every)
    return ",".join(every[first:] + every[:first])


def in_a_temporary_directory(
    run: Callable[[Path], Coroutine[Any, Any, Report]], keep_log: Path | None
) -> Report:
    """Run in a temporary directory. `keep_log`: where the services' logs are copied at the end."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return asyncio.run(run(Path(folder)))
        finally:
            if keep_log is not None:
                logs = [log.read_bytes() for log in sorted(Path(folder).glob("*.log"))]
                keep_log.write_bytes(b"".join(logs))
