"""A worker loses its connection to Redis while all other processes keep theirs. Its requests go on
until they need a block; then they wait, or continue elsewhere once the worker is given up. The
worker recovers by itself, without a supervisor."""

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from quire.async_client import AsyncClient
from quire.module_command import service_command
from tests.proxy import Proxy
from tests.waiting import until

from .deployment import Deployment
from .test_crashes import PoolView, is_whole, pool_view, streams, streams_while

__all__ = ["pool_view"]

LIMIT_S = 60.0


@pytest.fixture(scope="module")
def deployment(pairs: Deployment) -> Deployment:
    """Each test adds another worker."""
    return pairs


class ProxiedWorker:
    """`python -m services.worker` behind a proxy to Redis, configured as the deployment's own
    workers."""

    def __init__(self, deployment: Deployment, role: str, proxy: Proxy, log: Path) -> None:
        self.proxy = proxy
        self._log = log
        prefix = f"QUIRE_{role.upper()}_"
        like = deployment.running(f"--role={role}")[0]
        variables = Path(f"/proc/{like}/environ").read_text().split("\0")
        theirs = dict(line.split("=", 1) for line in variables if line.startswith(prefix))
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                service_command(role),
                env={**os.environ, **theirs, f"{prefix}REDIS_URL": f"redis://{proxy.address}"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def names(self) -> list[str]:
        """The worker ids that it has had, the current one last."""
        lines = [line for line in self._log.read_text().splitlines() if line.startswith("{")]
        events = map(json.loads, lines)
        return [event["worker_id"] for event in events if event["event"] == "worker_ready"]

    def stop(self) -> None:
        """Stop it, after a check that it is still the process that was started."""
        assert self._process.poll() is None, self._log.read_text()[-6000:]
        self._process.terminate()
        assert self._process.wait(LIMIT_S) == 0, self._log.read_text()[-6000:]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@asynccontextmanager
async def proxied_worker(
    deployment: Deployment, client: AsyncClient, role: str, log: Path
) -> AsyncIterator[ProxiedWorker]:
    (socket,) = deployment.run_root.glob("*/redis.sock")
    async with Proxy(str(socket)) as proxy:
        found = ProxiedWorker(deployment, role, proxy, log)
        try:
            await until(lambda: both_serve(client, found))
            yield found
            await asyncio.to_thread(found.stop)
        finally:
            found.kill()


async def both_serve(client: AsyncClient, proxied_worker: ProxiedWorker) -> bool:
    """Whether the added worker and the deployment's own workers serve, and nothing is held."""
    num_of_its_role = {"prefill": 2, "decode": 2}
    names = proxied_worker.names()
    if names:
        num_of_its_role[names[-1].partition("-")[0]] = 3
    return bool(names) and await is_whole(client, **num_of_its_role)


async def has_rejoined(proxied_worker: ProxiedWorker) -> bool:
    return len(proxied_worker.names()) == 2


@asynccontextmanager
async def slow(proxy: Proxy) -> AsyncIterator[None]:
    proxy.delay_s = 0.3
    yield
    proxy.delay_s = 0.0


@asynccontextmanager
async def cut(proxy: Proxy) -> AsyncIterator[None]:
    await proxy.close()
    yield
    await proxy.open()


@asynccontextmanager
async def half_open(proxy: Proxy) -> AsyncIterator[None]:
    proxy.hold()
    yield
    proxy.release()


@pytest.mark.parametrize(
    ("fault", "role"),
    [
        (cut, "prefill"),
        pytest.param(slow, "decode", marks=pytest.mark.full),
        pytest.param(half_open, "decode", marks=pytest.mark.full),
        pytest.param(slow, "prefill", marks=pytest.mark.full),
        pytest.param(cut, "decode", marks=pytest.mark.full),
        pytest.param(half_open, "prefill", marks=pytest.mark.full),
    ],
)
async def test_a_worker_cut_off_from_redis_only_delays_streams(
    deployment: Deployment,
    client: AsyncClient,
    pool_view: PoolView,
    tmp_path: Path,
    role: str,
    fault: Callable[[Proxy], AbstractAsyncContextManager[None]],
) -> None:
    """No stream gets an error, every token is that of the undisturbed run, and nothing is held in
    the end. After a short cut the worker goes on; after a long one it was given up, and has
    returned under another id."""
    async with proxied_worker(deployment, client, role, tmp_path / "worker.log") as worker:
        undisturbed = await asyncio.gather(*(s.run(client) for s in streams(0)))
        for is_long in (False, True):
            (name,) = worker.names()
            running = await streams_while(partial(pool_view.held_by, name), client, 0)
            async with fault(worker.proxy):
                if is_long and fault is not slow:
                    await pool_view.until(lambda stats: name not in stats.worker_ids)  # noqa: B023
                else:
                    await asyncio.sleep(3.0 if is_long else 1.0)  # the outage itself
            async with asyncio.timeout(LIMIT_S):
                assert await running == undisturbed
            if is_long and fault is not slow:
                await until(lambda: has_rejoined(worker))
            else:
                assert len(worker.names()) == 1
            await until(lambda: both_serve(client, worker))
            for audit in await client.audit():
                assert not audit.violations
    assert "law_broken" not in deployment.log.read_text()


async def test_a_fenced_worker_writes_nothing_that_others_read(
    deployment: Deployment, client: AsyncClient, pool_view: PoolView, tmp_path: Path
) -> None:
    """Other requests fill the pool while the worker is cut off. When it returns, their KV has not
    changed."""
    async with proxied_worker(deployment, client, "decode", tmp_path / "worker.log") as worker:
        (name,) = worker.names()
        running = await streams_while(partial(pool_view.held_by, name), client, seed=3)
        await worker.proxy.close()
        await running
        await pool_view.until(lambda stats: name not in stats.worker_ids)
        for seed in range(4, 8):  # each needs more than half of what there is
            await asyncio.gather(*(stream.run(client) for stream in streams(seed)))
        before = pool_view.content(without=set())
        await worker.proxy.open()
        await until(lambda: both_serve(client, worker))
        assert len(worker.names()) == 2
        assert pool_view.content(without=set()) == before
