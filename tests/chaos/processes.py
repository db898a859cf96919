"""The processes of a deployment: which of them are healthy, and the faults that hit them."""

import asyncio
import os
import re
import signal
from contextlib import suppress
from pathlib import Path

from quire.async_client import AsyncClient
from quire.errors import QuireError
from tests.chaos.limits import RECOVERY_S, UPGRADE_S
from tests.chaos.operator import Operator
from tests.chaos.schedule import PROCESSES, WORKERS, Fault
from tests.e2e.deployment import Deployment

FEWEST, MOST = {"prefill": 3, "decode": 4}, {"prefill": 4, "decode": 6}
"""(fewest, most) workers to which a run is scaled. A fault may hit one of two healthy ones."""


class Processes:
    """`wanted`: how many workers the run has when all are healthy."""

    def __init__(self, deployment: Deployment, operator: Operator, **wanted: int) -> None:
        self._deployment = deployment
        self._operator = operator
        self._wanted = wanted
        self._stopped: dict[int, asyncio.TimerHandle] = {}
        self._terminating: set[int] = set()
        self._serving: dict[int, str] = {}
        self._changing: set[int] = set()
        """The workers that were told to take the other role, which may be under way."""
        self._roles: dict[int, str] = {}
        """The role of each worker that has served, as the registry listed it last."""
        self._num_gateways = len(deployment.address.split(","))

    async def inject(self, fault: Fault) -> str:
        """Inject a fault as soon as another process of the role is healthy; returns what it hit.
        TimeoutError: no other process is healthy in time."""
        if fault.verb == "upgrade":
            return await self._upgrade()
        if fault.verb == "scale":
            await self._until_upgraded()
        try:
            async with asyncio.timeout(RECOVERY_S):
                if fault.verb == "scale":
                    return await self._scale(fault)
                pid = await self._choose_process(fault)
                await self._inject(fault, pid)
                return str(pid)
        except TimeoutError as error:
            raise TimeoutError(
                f"no healthy process for {fault.kind} within {RECOVERY_S:g} s"
            ) from error

    async def until_healthy(self) -> None:
        """Wait until all processes run, serve and are not stopped. TimeoutError, with the
        numbers."""
        await self._until_upgraded()
        number = {"gateway": self._num_gateways, "block_manager": 1, **self._wanted}
        try:
            async with asyncio.timeout(RECOVERY_S):
                for role in PROCESSES:
                    while self._stopped or len(await self._healthy(role)) != number[role]:
                        await asyncio.sleep(0.1)
        except TimeoutError as error:
            numbers = {role: (len(await self._healthy(role)), number[role]) for role in PROCESSES}
            raise TimeoutError(f"(healthy, wanted) processes: {numbers}") from error

    def close(self) -> None:
        for pid, timer in tuple(self._stopped.items()):
            timer.cancel()
            self._resume(pid)

    # ── which processes there are ────────────────────────────────────────────────────────────────

    async def _choose_process(self, fault: Fault) -> int:
        """The pid to hit. A process that is already ending, or changes its role, may be killed or
        stopped, but is not told to end again."""
        spare = 0 if fault.role == "block_manager" else 1
        while len(pids := await self._healthy(fault.role)) <= spare:
            await asyncio.sleep(0.1)
        if fault.verb in ("kill", "stop"):
            running = self._running(fault.role)
            busy = (self._terminating | self._changing) - self._stopped.keys()
            pids += [pid for pid in running if pid in busy and pid not in pids]
        return pids[int(fault.which * len(pids))]

    async def _inject(self, fault: Fault, pid: int) -> None:
        match fault.verb:
            case "kill":
                os.kill(pid, signal.SIGKILL)
            case "stop":
                os.kill(pid, signal.SIGSTOP)
                loop = asyncio.get_running_loop()
                self._stopped[pid] = loop.call_later(fault.length_s, self._resume, pid)
            case "terminate":
                self._terminating.add(pid)
                os.kill(pid, signal.SIGTERM)
            case "drain":
                self._terminating.add(pid)
                worker_id = self._serving[pid]
                while await self._operator.call(lambda client: client.drain(worker_id)) is None:
                    await asyncio.sleep(0.1)
            case "role":
                worker_id, role = self._serving[pid], {"prefill": "decode", "decode": "prefill"}
                other = role[fault.role]  # a worker that ends meanwhile refuses
                self._changing.add(pid)
                await self._operator.call(lambda client: client.change_role(worker_id, other))

    async def _healthy(self, role: str) -> list[int]:
        """Pids, in order, without those that are ending or stopped. A worker is healthy if the
        registry listed it as serving when it was last read; a gateway if it says so."""
        running = self._running(role)
        pids = [pid for pid in running if pid not in self._stopped and pid not in self._terminating]
        if role == "gateway":
            return [pid for pid in pids if await _is_ready(pid)]
        if role in WORKERS:
            await self._restore_workers()
            return [pid for pid in pids if pid in self._serving]
        return pids

    async def _restore_workers(self) -> None:
        """Update which workers serve, and scale to the wanted numbers again."""
        decode, prefill = self._wanted["decode"], self._wanted["prefill"]
        await self._operator.call(lambda run: run.scale(num_prefill=prefill, num_decode=decode))
        workers = await self._operator.call(AsyncClient.workers)
        if workers is not None:
            serving = [worker for worker in workers if worker.state == "serving"]
            ids = {worker.worker_id for worker in serving}
            self._roles |= {worker.pid: worker.role for worker in serving}
            pids = [pid for role in WORKERS for pid in self._running(role)]
            found = {pid: worker_ids(pid) & ids for pid in pids}
            self._serving = {
                pid: worker_ids.pop() for pid, worker_ids in found.items() if worker_ids
            }

    def _running(self, role: str) -> list[int]:
        started = {
            pid: of_spec
            for of_spec in (WORKERS if role in WORKERS else (role,))
            for pid in self._deployment.children(f"(services[.]|--role=){of_spec}")
        }
        return sorted(pid for pid in started if self._roles.get(pid, started[pid]) == role)

    def _resume(self, pid: int) -> None:
        del self._stopped[pid]
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    # ── how many there are ───────────────────────────────────────────────────────────────────────

    async def _scale(self, fault: Fault) -> str:
        """Scale to another number; to a smaller one only when all are healthy, since the remaining
        workers take over at once."""
        role, now = fault.role, self._wanted[fault.role]
        numbers = [n for n in range(FEWEST[role], MOST[role] + 1) if n != now]
        number = numbers[int(fault.which * len(numbers))]
        while number < now and len(await self._healthy(role)) < now:
            await asyncio.sleep(0.1)
        self._wanted[role] = number
        while len(await self._healthy(role)) > number:
            await asyncio.sleep(0.1)
        return f"from {now} to {number}"

    async def _upgrade(self) -> str:
        """Begin to replace every process, unless that is going on. Other faults hit the processes
        meanwhile."""
        upgrade = await self._operator.call(lambda run: run.upgrade(begin=True))
        return "no gateway" if upgrade is None else f"after {len(upgrade.steps)} steps"

    async def _until_upgraded(self) -> None:
        """Wait until no upgrade goes on. Raises TimeoutError."""
        try:
            async with asyncio.timeout(UPGRADE_S):
                while (found := await self._operator.call(AsyncClient.upgrade)) is None or (
                    found.is_running
                ):
                    await asyncio.sleep(0.1)
        except TimeoutError as error:
            raise TimeoutError(f"an upgrade takes more than {UPGRADE_S:g} s") from error


async def _is_ready(pid: int) -> bool:
    with suppress(QuireError, OSError, TimeoutError):
        port = _environment(pid)["QUIRE_GATEWAY_PORT"]
        async with AsyncClient(f"127.0.0.1:{port}") as client, asyncio.timeout(3.0):
            return await client.is_ready()
    return False


def worker_ids(pid: int) -> set[str]:
    """Worker ids, by the lock files that the process has open, which may have been renamed
    since."""
    ids = set()
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if found := re.search(r"/workers/\.?([^./]+)\.lock", os.readlink(link)):
                    ids.add(found[1])
    return ids


def _environment(pid: int) -> dict[str, str]:
    raw = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(os.fsdecode(entry).split("=", 1) for entry in raw if b"=" in entry)
