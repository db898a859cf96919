"""Two hosts as network namespaces: one of them is cut off for longer than anything of it is kept,
and comes back. (`tests/chaos/test_hosts.py` has the shorter faults of a network.)"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from quire.async_client import AsyncClient
from quire.errors import Unavailable
from quire.sockets import living_sockets
from quire.types import Completion
from tests.conftest import Valkey
from tests.waiting import until

from .conftest import POOL_MEMORY, Oracle
from .hosts import Host
from .network import ADDRESSES, Network, why_not
from .quiet import quiet
from .test_serving import greedy, prompt

WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "it may")

REDIS_PORT, GATEWAY_PORT = 7390, 7391
MOVER = {"LOG_LEVEL": "debug", "LEASE_S": "3", "PULL_TIMEOUT_S": "4"}


@dataclass
class Cluster:
    """Host a computes prompts, host b decodes. The gateway runs on a, Redis outside of both."""

    network: Network
    a: Host
    b: Host
    num_movers: int = 0

    def start_mover(self, host: Host) -> str:
        """Start a mover; returns the name of its log, which no other mover has."""
        self.num_movers += 1
        name = f"mover-{self.num_movers}"
        host.start("mover", name, **MOVER)
        return name

    def movers(self, host: Host) -> list[str]:
        return [name for name in host.processes if name.startswith("mover")]

    def steps(self, host: Host, step: str) -> int:
        """How often movers of this host have reached this step of a pull."""
        logs = (host.events(name, "pull_step") for name in self.movers(host))
        return sum(event["step"] == step for events in logs for event in events)


@pytest.fixture(scope="module")
def cluster(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    network, folder = Network(), tmp_path_factory.mktemp("networks")
    options = ("--port", str(REDIS_PORT), "--bind", ADDRESSES["here"], "--protected-mode", "no")
    valkey = Valkey(folder, *options)
    hosts = []
    try:
        valkey.start()
        for name in ("a", "b"):
            redis_url = f"redis://{ADDRESSES['here']}:{REDIS_PORT}"
            host = Host(
                name,
                folder,
                checkpoint,
                redis_url,
                POOL_MEMORY,
                ADDRESSES[name],
                within=network.within(name),
                settings={"UCX_TLS": "tcp,self"},
            )
            hosts.append(host)
        cluster = Cluster(network, hosts[0], hosts[1])
        for host, role in zip(hosts, ("prefill", "decode"), strict=True):
            host.start("block_manager")
            host.start(role)
            host.wait_for(role, "worker_ready")
        for host in hosts:
            cluster.start_mover(host)
        hosts[0].start("gateway", PORT=str(GATEWAY_PORT), PATIENCE_S="60", HTTP_PORT="none")
        hosts[0].wait_for("gateway", "gateway_listening")
        yield cluster
    finally:
        network.heal()
        for host in hosts:
            host.stop()
        valkey.kill()
        network.close()


@asynccontextmanager
async def serving(cluster: Cluster) -> AsyncIterator[AsyncClient]:
    """A client. Movers that end are started again, as a supervisor does. At the end nothing is
    held."""
    sockets = ",".join(f"unix:{path}" for path in living_sockets(cluster.a.run_dir))
    client = AsyncClient(f"{ADDRESSES['a']}:{GATEWAY_PORT}", operations=sockets)
    keeping = asyncio.create_task(keep_movers(cluster))
    try:
        await until(client.is_ready)
        yield client
        await quiet(client)
    finally:
        keeping.cancel()
        await client.close()


async def keep_movers(cluster: Cluster) -> None:
    while True:
        for host in (cluster.a, cluster.b):
            if all(host.processes[name].poll() is not None for name in cluster.movers(host)):
                cluster.start_mover(host)
        await asyncio.sleep(0.05)


def ask(
    client: AsyncClient, prompts: Sequence[Sequence[int]], num_tokens: int = 24
) -> list["asyncio.Task[Completion]"]:
    sampling = greedy(num_tokens)
    return [asyncio.create_task(client.complete(p, sampling, timeout_s=90)) for p in prompts]


async def assert_right(
    oracle: Oracle, prompts: Sequence[Sequence[int]], asked: Sequence[Any]
) -> None:
    for tokens, completion in zip(prompts, await asyncio.gather(*asked), strict=True):
        assert list(completion.token_ids) == oracle.choices(tokens, completion.token_ids)


def prompts(seed: int, number: int, length: int) -> list[list[int]]:
    return [prompt(seed * 100 + index, length + index) for index in range(number)]


FROM_REDIS = {("b", "here"), ("here", "b")}
FROM_ALL = FROM_REDIS | {("a", "b"), ("b", "a")}
LEASE_S, REGISTERED_S = float(MOVER["LEASE_S"]), 3.0
"""How long a mover's pins, and an entry of the registry, stay without renewal."""


@pytest.mark.parametrize(
    "cut",
    [
        pytest.param(FROM_REDIS, marks=pytest.mark.full, id="from Redis"),
        pytest.param(FROM_ALL, id="from all"),
    ],
)
async def test_a_host_comes_back_after_longer_than_lease_and_registration(
    cluster: Cluster, oracle: Oracle, cut: set[tuple[str, str]]
) -> None:
    """Meanwhile another host decodes: requests that ran on the cut one are computed again, or wait
    for it, and new ones are served. Its worker comes back as the same member, with its pool."""
    async with serving(cluster) as client, another_decode_worker(cluster.a) as other:
        (pool,) = (path.name for path in cluster.b.pool_root.iterdir() if path.is_dir())
        (worker,) = (path.stem for path in cluster.b.pool_root.glob("*/workers/decode-*.lock"))
        await until_serving(client, {worker, other})
        cluster.network.delay_s, before = 0.02, cluster.steps(cluster.b, "claimed")
        asked = ask(client, all_of := prompts(20, 6, 400), num_tokens=200)
        await until(lambda: cluster.steps(cluster.b, "claimed") > before)
        cluster.network.blocked, began = cut, asyncio.get_running_loop().time()
        await until_serving(client, {other})
        new = ask(client, new_ones := prompts(21, 4, 300))
        await assert_right(oracle, new_ones, new)
        length_s = LEASE_S + REGISTERED_S + 2.0
        await asyncio.sleep(began + length_s - asyncio.get_running_loop().time())
        cluster.network.heal()
        await until_serving(client, {worker, other})
        await assert_right(oracle, all_of, asked)
    async with serving(cluster) as client:  # host b decodes alone again
        assert pool in {each.pool_id for each in await client.pools()}
        before = cluster.steps(cluster.b, "committed")
        asked = ask(client, all_of := prompts(22, 2, 300))
        await assert_right(oracle, all_of, asked)
        assert cluster.steps(cluster.b, "committed") > before


async def until_serving(client: AsyncClient, worker_ids: set[str]) -> None:
    """Wait until these decode workers serve, and no others. A block manager that is cut off from
    Redis cannot say it."""

    async def serving() -> set[str]:
        workers = await client.workers()
        return {w.worker_id for w in workers if (w.role, w.state) == ("decode", "serving")}

    await until(serving, lambda now: now == worker_ids, not_yet=(Unavailable,))


@asynccontextmanager
async def another_decode_worker(host: Host) -> AsyncIterator[str]:
    """A decode worker for a while, which leaves by itself. It takes two sequences, so that more go
    to the other host. Yields its id."""
    name = f"decode-{secrets.token_hex(4)}"  # of its own log
    host.start("decode", name, MAX_NUM_SEQS="2")
    found = await asyncio.to_thread(host.wait_for, name, "worker_ready")
    yield found["worker_id"]
    process = host.processes.pop(name)
    process.terminate()
    await asyncio.to_thread(process.wait, 30)
