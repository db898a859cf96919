"""The processes of a deployment as who torments them sees them: which are there and well, and what
can be done to one."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from quire.client import AsyncClient
from quire.errors import QuireError
from tests.chaos.schedule import Event
from tests.e2e.deployment import Deployment

WELL_LIMIT_S = 60.0
"""How long one may take to come back, or a law to be checked."""

MODULES = {"redis": "valkey"}


class System:
    def __init__(self, deployment: Deployment, client: AsyncClient) -> None:
        self._deployment = deployment
        self._client = client
        self._stopped: dict[int, asyncio.TimerHandle] = {}
        self._environments: dict[str, dict[str, str]] = {}
        self._substitutes: list[tuple[str, subprocess.Popen[bytes]]] = []

    async def suffer(self, event: Event) -> str:
        """Let it happen to one of those that may be hit, as soon as another of its kind is well;
        who it was. TimeoutError: there is none in time."""
        pid = await self._victim(event)
        match event.verb:
            case "kill":
                os.kill(pid, signal.SIGKILL)
            case "stop":
                os.kill(pid, signal.SIGSTOP)
                loop = asyncio.get_running_loop()
                self._stopped[pid] = loop.call_later(event.length_s, self._wake, pid)
            case "drain":
                await self._drain(event.role, pid)
        return str(pid)

    async def until_clean(self) -> None:
        """An audit is answered, and finds nothing. AssertionError: it does. While a pool recovers
        from a lost Redis its blocks have no places yet, and no audit counts."""
        async with asyncio.timeout(WELL_LIMIT_S):
            while True:
                with suppress(QuireError):
                    audits = await self._client.audit()
                    wrong = [audit for audit in audits if audit.violations]
                    assert not any(audit.ledger_checked for audit in wrong), wrong
                    if not wrong:
                        return
                await asyncio.sleep(0.1)

    async def until_empty(self) -> None:
        """Nothing is held any more. TimeoutError."""
        async with asyncio.timeout(WELL_LIMIT_S):
            while True:
                with suppress(QuireError):
                    pools = await self._client.pools()
                    if pools and not any(pool.num_held for pool in pools):
                        return
                await asyncio.sleep(0.1)

    def close(self) -> None:
        for pid in tuple(self._stopped):
            self._wake(pid)
        for _, process in self._substitutes:
            process.kill()
            process.wait()

    # Who is there

    async def _victim(self, event: Event) -> int:
        spare = 1 if event.role in ("prefill", "decode", "gateway") else 0
        async with asyncio.timeout(WELL_LIMIT_S):
            while True:
                well = await self._well(event.role)
                if len(well) > spare:
                    return well[int(event.which * len(well))]
                await asyncio.sleep(0.1)

    async def _well(self, role: str) -> list[int]:
        """Pids, in order; a worker is well when it is in the registry as serving, a gateway when it
        says so itself."""
        self._replace(role)
        pids = self._pids(role)
        if role == "gateway":
            return [pid for pid in pids if await _answers(pid)]
        if role not in ("prefill", "decode"):
            return pids
        with suppress(QuireError):
            workers = await self._client.workers()
            serving = {worker.worker_id for worker in workers if worker.state == "serving"}
            return [pid for pid in pids if _worker_id(pid) in serving]
        return []

    def _pids(self, role: str) -> list[int]:
        children = self._deployment.children(MODULES.get(role, f"services.{role}"))
        own = [p.pid for name, p in self._substitutes if name == role and p.poll() is None]
        return sorted(pid for pid in (*children, *own) if pid not in self._stopped)

    def _wake(self, pid: int) -> None:
        del self._stopped[pid]
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    # Who leaves is replaced

    async def _drain(self, role: str, pid: int) -> None:
        """It leaves for good, so that another process takes its place."""
        self._environments[role] = _environment(pid)
        worker_id = _worker_id(pid)
        mine = [process for _, process in self._substitutes if process.pid == pid]
        await self._client.drain(worker_id)
        if not mine:
            self._substitutes.append((role, self._start(role)))

    def _replace(self, role: str) -> None:
        for number, (name, process) in enumerate(self._substitutes):
            if name == role and process.poll() is not None:
                self._substitutes[number] = role, self._start(role)

    def _start(self, role: str) -> "subprocess.Popen[bytes]":
        with self._deployment.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", f"services.{role}"],
                env=self._environments[role],
                stdout=log,
                stderr=log,
            )


async def _answers(pid: int) -> bool:
    with suppress(QuireError, OSError):
        port = _environment(pid)["QUIRE_GATEWAY_PORT"]
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            return await client.is_ready()
    return False


def _worker_id(pid: int) -> str:
    """By the lock that it holds, whose file may have got its name later; "" while it has none."""
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if found := re.search(r"/workers/\.?([^./]+)\.lock", os.readlink(link)):
                    return found[1]
    return ""


def _environment(pid: int) -> dict[str, str]:
    raw = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    environment = dict(os.fsdecode(entry).split("=", 1) for entry in raw if b"=" in entry)
    environment.pop("QUIRE_PARENT_FD", None)
    return environment
