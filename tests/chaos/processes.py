"""The processes of a deployment: which ones are alive and well, and the events that disturb
them."""

import asyncio
import os
import re
import signal
from contextlib import suppress
from pathlib import Path

from quire.async_client import AsyncClient
from quire.errors import QuireError
from tests.chaos.limits import BACK_S
from tests.chaos.operator import Operator
from tests.chaos.schedule import PROCESSES, WORKERS, Event
from tests.e2e.deployment import Deployment

FEWEST, MOST = {"prefill": 3, "decode": 4}, {"prefill": 4, "decode": 6}
"""(fewest, most) workers to which a run is scaled. With two that are well, an event may hit one."""


class Processes:
    """`wanted`: how many workers the run has when all are well."""

    def __init__(self, deployment: Deployment, operator: Operator, **wanted: int) -> None:
        self._deployment = deployment
        self._operator = operator
        self._wanted = wanted
        self._stopped: dict[int, asyncio.TimerHandle] = {}
        self._leaving: set[int] = set()
        self._serving: dict[int, str] = {}
        self._num_gateways = len(deployment.address.split(","))

    async def suffer(self, event: Event) -> str:
        """Apply an event as soon as another process of the kind is well; returns what it hit.
        TimeoutError: none is well in time."""
        try:
            async with asyncio.timeout(BACK_S):
                if event.verb == "scale":
                    return await self._scale(event)
                pid = await self._victim(event)
                await self._hit(event, pid)
                return str(pid)
        except TimeoutError as error:
            raise TimeoutError(f"nobody came back to {event.kind}") from error

    async def until_well(self) -> None:
        """Wait until all processes run, serve and are not stopped. TimeoutError, with the
        numbers."""
        number = {"gateway": self._num_gateways, "block_manager": 1, **self._wanted}
        try:
            async with asyncio.timeout(BACK_S):
                for role in PROCESSES:
                    while self._stopped or len(await self._well(role)) != number[role]:
                        await asyncio.sleep(0.1)
        except TimeoutError as error:
            there = {role: (len(await self._well(role)), number[role]) for role in PROCESSES}
            raise TimeoutError(f"not all came back, of so many: {there}") from error

    def close(self) -> None:
        for pid, timer in tuple(self._stopped.items()):
            timer.cancel()
            self._wake(pid)

    # ── who is there ─────────────────────────────────────────────────────────────────────────────

    async def _victim(self, event: Event) -> int:
        """The pid to hit. A process that already leaves may be killed or stopped, but not told to
        leave again."""
        spare = 0 if event.role == "block_manager" else 1
        while len(victims := await self._well(event.role)) <= spare:
            await asyncio.sleep(0.1)
        if event.verb in ("kill", "stop"):
            there = self._alive(event.role)
            victims += [pid for pid in there if pid in self._leaving and pid not in self._stopped]
        return victims[int(event.which * len(victims))]

    async def _hit(self, event: Event, pid: int) -> None:
        match event.verb:
            case "kill":
                os.kill(pid, signal.SIGKILL)
            case "stop":
                os.kill(pid, signal.SIGSTOP)
                loop = asyncio.get_running_loop()
                self._stopped[pid] = loop.call_later(event.length_s, self._wake, pid)
            case "terminate":
                self._leaving.add(pid)
                os.kill(pid, signal.SIGTERM)
            case "drain":
                self._leaving.add(pid)
                worker_id = self._serving[pid]
                while await self._operator.ask(lambda client: client.drain(worker_id)) is None:
                    await asyncio.sleep(0.1)

    async def _well(self, role: str) -> list[int]:
        """Pids, in order, without those that leave or are stopped. A worker is well if the registry
        listed it as serving when it was last read; a gateway if it says so."""
        there = self._alive(role)
        pids = [pid for pid in there if pid not in self._stopped and pid not in self._leaving]
        if role == "gateway":
            return [pid for pid in pids if await _answers(pid)]
        if role in WORKERS:
            await self._muster()
            return [pid for pid in pids if pid in self._serving]
        return pids

    async def _muster(self) -> None:
        """Update which workers serve, and ask for the wanted number of workers again."""
        decode, prefill = self._wanted["decode"], self._wanted["prefill"]
        await self._operator.ask(lambda run: run.scale(num_prefill=prefill, num_decode=decode))
        workers = await self._operator.ask(AsyncClient.workers)
        if workers is not None:
            ids = {worker.worker_id for worker in workers if worker.state == "serving"}
            pids = [pid for role in WORKERS for pid in self._alive(role)]
            found = {pid: worker_ids(pid) & ids for pid in pids}
            self._serving = {
                pid: worker_ids.pop() for pid, worker_ids in found.items() if worker_ids
            }

    def _alive(self, role: str) -> list[int]:
        return sorted(self._deployment.children(f"services.{role}"))

    def _wake(self, pid: int) -> None:
        del self._stopped[pid]
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    # ── how many there are ───────────────────────────────────────────────────────────────────────

    async def _scale(self, event: Event) -> str:
        """Scale to another number; to a smaller one only when all are well, since the remaining
        workers take over at once."""
        role, now = event.role, self._wanted[event.role]
        numbers = [n for n in range(FEWEST[role], MOST[role] + 1) if n != now]
        number = numbers[int(event.which * len(numbers))]
        while number < now and len(await self._well(role)) < now:
            await asyncio.sleep(0.1)
        self._wanted[role] = number
        while len(await self._well(role)) > number:
            await asyncio.sleep(0.1)
        return f"from {now} to {number}"


async def _answers(pid: int) -> bool:
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
