"""Starts a server, waits until it serves, and ends it with everything that it started."""

import asyncio
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bench.load import GrpcTarget, HttpTarget, Record, Target, send
from bench.peers.peer import Command, Dtype, Peer, PeerFailed, ServerOptions
from bench.peers.quire import Quire
from quire.async_client import AsyncClient
from quire.types import Sampling

READY_LIMIT_S = 600.0
_STOP_LIMIT_S = 30.0
SETTLE_S = 10.0
"""How long a server may work after its first token, such as on the rest of its memory, before the
measurement begins."""


@dataclass(frozen=True, slots=True)
class Running:
    target: Target
    ready_s: float
    """From the start of the process to the first token."""


@asynccontextmanager
async def running(
    peer: Peer, model: Path, dtype: Dtype, options: ServerOptions
) -> AsyncIterator[Running]:
    """`model` as `peer.prepare` returned it. PeerFailed: it ended, or did not serve in time."""
    with tempfile.TemporaryFile() as log:
        began = time.perf_counter()
        process = _start(peer.server(model, dtype, options), log.fileno())
        target = _target(peer, options.port)
        try:
            while not await _answers(target):
                if process.poll() is not None or time.perf_counter() - began > READY_LIMIT_S:
                    log.seek(0)
                    tail = log.read()[-4000:].decode(errors="replace")
                    raise PeerFailed(f"{peer.name} does not serve; its log ends with\n{tail}")
                await asyncio.sleep(0.1)
            ready_s = time.perf_counter() - began
            await asyncio.sleep(SETTLE_S)
            yield Running(target, ready_s)
        finally:
            await target.close()
            await asyncio.to_thread(_stop, process)


def _start(command: Command, log: int) -> subprocess.Popen[bytes]:
    """In a process group of its own, so that its children can be ended with it."""
    return subprocess.Popen(
        command.arguments,
        env=command.full_environment,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


def _target(peer: Peer, port: int) -> Target:
    if isinstance(peer, Quire):
        client = AsyncClient(f"127.0.0.1:{port}", resume_window_s=0.0)
        return GrpcTarget(client, Sampling(temperature=0.0, ignore_eos=True))
    fields = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return HttpTarget(f"http://127.0.0.1:{port}", "bench", fields=fields)


async def _answers(target: Target) -> bool:
    await send(target, [300, 301, 302], 1, record := Record())
    return not record.error


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Its children get the rest of the time to end after it: they remove what they shared."""
    deadline = time.monotonic() + _STOP_LIMIT_S
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_LIMIT_S)
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)  # ProcessLookupError: nobody is left of the group
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
