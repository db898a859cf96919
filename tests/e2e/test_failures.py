"""Processes are killed: nothing hangs, no wrong token is served, and the deployment recovers by
itself."""

import asyncio
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from quire.async_client import AsyncClient
from quire.errors import QuireError, Unavailable
from quire.module_command import service_command
from quire.types import Sampling
from tests.waiting import until, wait_until

from .conftest import Oracle
from .deployment import Deployment, deploying, remove, start
from .quiet import quiet

RECOVERY_LIMIT_S = 60.0
"""The limit on a busy machine; docs/benchmarks/store-and-recovery.md has the times of a quiet one.
A ticket that was claimed and finished may return with a recovered ledger as its issuer's, for 30
s."""

PROMPT = list(range(260, 300))
GREEDY = Sampling(temperature=0.0, max_tokens=200, ignore_eos=True)


deployment = deploying("--pool-memory", "16MiB")


@pytest.fixture(scope="module")
def expected(oracle: Oracle) -> list[int]:
    return oracle.greedy(PROMPT, 200)


async def recovered(client: AsyncClient, expected: list[int]) -> None:
    """Wait, within the limit, until a request gets the right answer."""
    completion = await until(
        lambda: client.complete(PROMPT, GREEDY, timeout_s=5.0),
        limit_s=RECOVERY_LIMIT_S,
        not_yet=(QuireError,),
    )
    assert list(completion.token_ids) == expected


@pytest.mark.parametrize(
    "victim",
    ["--role=prefill", "--role=decode", "services.gateway", "services.block_manager", "valkey"],
)
async def test_a_killed_process_comes_back(
    deployment: Deployment, client: AsyncClient, expected: list[int], victim: str
) -> None:
    """Running streams may fail; the tokens that they sent before are right."""
    await recovered(client, expected)

    async def stream() -> list[int]:
        tokens: list[int] = []
        try:
            async for delta in client.generate(PROMPT, GREEDY, timeout_s=30.0):
                tokens += delta.token_ids
        except QuireError:
            pass
        return tokens

    streams = [asyncio.create_task(stream()) for _ in range(8)]
    await asyncio.sleep(0.05)  # somewhere in the middle
    for pid in deployment.running(victim):
        os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(RECOVERY_LIMIT_S):
        for tokens in await asyncio.gather(*streams):
            assert tokens == expected[: len(tokens)]
    await recovered(client, expected)
    await quiet(client, RECOVERY_LIMIT_S)


async def test_a_decode_worker_that_joins_takes_load(
    deployment: Deployment, client: AsyncClient, expected: list[int]
) -> None:
    """A new decode worker gets requests without a restart of any process."""
    await recovered(client, expected)
    (pid,) = deployment.running("--role=decode")
    joining = _one_more_like(pid)
    try:
        load = [asyncio.create_task(_load(client)) for _ in range(2)]
        await until(lambda: _both_run(client), limit_s=RECOVERY_LIMIT_S)
        for task in load:
            task.cancel()
        await asyncio.gather(*load, return_exceptions=True)
    finally:
        joining.send_signal(signal.SIGTERM)
        assert joining.wait(20) == 0
    await recovered(client, expected)


def _one_more_like(pid: int) -> "subprocess.Popen[bytes]":
    raw = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    environ = dict(os.fsdecode(entry).split("=", 1) for entry in raw if b"=" in entry)
    environ.pop("QUIRE_PARENT_FD", None)
    return subprocess.Popen(service_command("decode"), env=environ, stderr=subprocess.DEVNULL)


async def _load(client: AsyncClient) -> None:
    short = replace(GREEDY, max_tokens=30)
    while True:
        await client.complete(PROMPT, short)


async def _both_run(client: AsyncClient) -> bool:
    try:
        workers = await client.workers()
    except Unavailable:  # the block manager is not back yet
        return False
    decoders = [worker for worker in workers if worker.role == "decode"]
    return len(decoders) == 2 and all(worker.num_running for worker in decoders)


def test_a_killed_supervisor_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    """No orphan process remains, and the next start removes the old run's files."""
    first = start(checkpoint, tmp_path, "--pool-memory", "16MiB")
    try:
        first.wait_until_ready()
        children = first.children()
        assert len(children) >= 5
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait(10)
        wait_until(lambda: not any(map(_alive, children)), limit_s=10)
        second = start(checkpoint, tmp_path, "--pool-memory", "16MiB")
        try:
            second.wait_until_ready()
            runs = [path for path in second.run_root.iterdir() if path.is_dir()]
            assert len(runs) == 1
        finally:
            assert second.stop() == 0
        assert not second.run_root.exists()
    finally:
        remove(first.run_root)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
