"""Pools of two hosts: a prompt that host a computes decodes on host b, and a cached prefix is
copied instead of computed. The workers have two ranks, of which each has half of the heads, so a
mover copies two parts of each block. (`tests/chaos/test_hosts.py` has workers of one rank.)"""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from blockstore.hashing import root_hash
from blockstore.redis_registry import RedisRegistry
from quire.async_client import AsyncClient
from quire.sockets import living_sockets
from quire.supervisor.run_directory import free_port
from services.gateway.workers.movers import Movers
from services.protocol.ticket import SamplingParams, Ticket
from services.runtime.secret import Secret
from tests.waiting import until

from .conftest import POOL_MEMORY, Oracle
from .hosts import SECRET, Host
from .quiet import quiet
from .test_serving import greedy, prompt


@contextmanager
def two_hosts(
    valkey: Any,
    checkpoint: Path,
    folder: Path,
    pool_memory: int,
    devices: tuple[str, str] = ("cpu", "cpu"),
) -> Iterator[tuple[Host, Host]]:
    """Host a has only a prefill worker, host b only a decode worker; the gateway is on a."""
    valkey.command("FLUSHALL")
    a, b = (Host(name, folder, checkpoint, valkey.url, pool_memory) for name in ("a", "b"))
    try:
        for host, role, device in ((a, "prefill", devices[0]), (b, "decode", devices[1])):
            host.start("block_manager")
            host.start(role, DEVICE=device, TENSOR_PARALLEL_SIZE="2")
            host.wait_for(role, "worker_ready")
            host.start("mover")
        for host in (a, b):
            host.wait_for("mover", "source_joined")
        a.start(
            "gateway",
            PORT=str(free_port("127.0.0.1")),
            REPORT_CACHED_TOKENS="true",
            PATIENCE_S="60",
        )
        yield a, b
    finally:
        for host in (a, b):
            host.stop()


@pytest.fixture(scope="module")
def hosts(
    valkey_server: Any, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Host, Host]]:
    folder = tmp_path_factory.mktemp("hosts")
    with two_hosts(valkey_server, checkpoint, folder, 2 * POOL_MEMORY) as hosts:
        yield hosts


@pytest.fixture
async def client(hosts: tuple[Host, Host]) -> AsyncIterator[AsyncClient]:
    async with connected(hosts[0]) as client:
        yield client


@asynccontextmanager
async def connected(a: Host) -> AsyncIterator[AsyncClient]:
    address = f"{a.ip}:{a.wait_for('gateway', 'gateway_listening')['port']}"
    sockets = ",".join(f"unix:{path}" for path in living_sockets(a.run_dir))
    client = AsyncClient(address, operations=sockets)
    await until(client.is_ready)
    yield client
    await client.close()


@asynccontextmanager
async def movers(host: Host, source: str, target: str) -> AsyncIterator[Movers]:
    """The movers as the gateway lists them, once they can copy from pool `source` to `target`."""
    secret = Secret(SECRET.encode())
    registry = await RedisRegistry.connect(host.redis_url, secret.registry_key)
    running = Movers(secret.rpc_key)

    async def bandwidth() -> float:
        running.follow(await registry.members())
        return running.bandwidth(source, target)

    await until(bandwidth)
    yield running
    await running.close()
    await registry.close()


@pytest.mark.parametrize("length", [1, 16, 100, 700])
async def test_a_prompt_computed_on_one_host_decodes_on_another(
    hosts: tuple[Host, Host], client: AsyncClient, oracle: Oracle, length: int
) -> None:
    """The last block of a prompt is full, or begun."""
    workers = await client.workers()
    sizes = [w.engine["tensor_parallel_size"] for w in workers if w.role != "mover"]
    assert sizes == ["2", "2"]
    tokens = prompt(length, length)
    completion = await client.complete(tokens, greedy(24), timeout_s=60)
    assert list(completion.token_ids) == oracle.greedy(tokens, 24)
    await quiet(client)
    assert not hosts[1].events("mover", "pull_failed")


async def test_a_cached_prefix_is_copied(
    hosts: tuple[Host, Host], client: AsyncClient, oracle: Oracle
) -> None:
    """Host b has the KV of an answer, host a only that of its prompt. Once a mover has copied the
    rest, host a computes only the last block."""
    a, b = (host.wait_for("mover", "mover_ready")["pool_id"] for host in hosts)
    tokens = prompt(7, 40)
    answer = await client.complete(tokens, greedy(60), timeout_s=60)
    longer = [*tokens, *answer.token_ids]
    async with movers(hosts[0], b, a) as running:
        (spec,) = [pool for pool in await client.pools() if pool.pool_id == a]
        root = root_hash(spec.fingerprint, Secret(SECRET.encode()).root, "")
        ticket = Ticket(
            "r",
            1,
            1,
            "h",
            0,
            pool_id=a,
            root_hash=root,
            prompt_token_ids=tuple(longer),
            sampling=SamplingParams(0.0, 0, 1.0, 0.0, 1, 1),
        )
        assert await running.pull(ticket, b, a) is None
    again = await client.complete(longer, greedy(8), timeout_s=60)
    assert again.usage.num_cached_tokens == 96
    assert list(again.token_ids) == oracle.greedy(longer, 8)
    await quiet(client)


@pytest.mark.full
async def test_a_prompt_computed_on_one_gpu_decodes_on_another(
    valkey_server: Any, checkpoint: Path, tmp_path: Path, oracle: Oracle
) -> None:
    """Between GPUs of one host (which are memory of the host here) the GPUs copy, not NIXL."""
    devices = "memfd:0,memfd:1", "memfd:2,memfd:3"
    with two_hosts(valkey_server, checkpoint, tmp_path, 2 * POOL_MEMORY, devices) as hosts:
        async with connected(hosts[0]) as client:
            for length in (16, 100):
                tokens = prompt(length, length)
                completion = await client.complete(tokens, greedy(24), timeout_s=60)
                assert list(completion.token_ids) == oracle.greedy(tokens, 24)
            await quiet(client)
        assert not hosts[1].events("mover", "pull_failed")
