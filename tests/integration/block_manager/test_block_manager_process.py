"""`python -m services.block_manager` as a process, with a real Valkey and workers that join."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Protocol

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from blockstore.errors import BlockStoreError
from blockstore.redis_registry import RedisRegistry
from blockstore.redis_store import RedisStore
from blockstore.registry import Member
from quire.v1 import block_manager_pb2 as pb
from quire.v1 import block_manager_pb2_grpc
from services.pool.directory import pool_directories
from services.runtime.rpc.transport import open_channel
from tests.secret import SECRET, proven
from tests.waiting import until

LIMIT_S = 60.0
SERVICE = "quire.v1.BlockManager"
# Joins, takes three blocks of which the first is finished but not committed, and sits there.
WORKER = """
import asyncio, sys
from pathlib import Path

from blockstore.redis_store import RedisStore
from services.pool.layout import PoolLayout
from services.pool.sizing import MemoryPlan
from services.worker.membership import join
from tests.waiting import until

async def beat(store, pool_id, worker_id):
    while True:
        await store.heartbeat(pool_id, worker_id)
        await asyncio.sleep(0.05)

async def main(url, root, worker_id):
    store = await RedisStore.connect(url)
    layout = PoolLayout("tiny", "f00d", 1, 1, 1, "float32", 4)
    me = await join(store, store.run_id, Path(root), layout, worker_id, MemoryPlan(10_000))
    beating = asyncio.create_task(beat(store, me.spec.pool_id, worker_id))
    given = await store.allocate(me.spec.pool_id, "h-" + worker_id, worker_id, 1, [], 3)
    me.stamps.mark_owned(given.block_ids, "h-" + worker_id)
    me.stamps.complete(given.block_ids[0], worker_id.encode().ljust(16), bytes(16), [1, 2, 3, 4])
    print("pool", me.spec.pool_id, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    beating.cancel()
    await store.release(me.spec.pool_id, "h-" + worker_id, 1)
    await me.leave()
    await store.close()

asyncio.run(main(*sys.argv[1:]))
"""


class Valkey(Protocol):
    """The part of the server's fixture that this suite needs."""

    url: str

    def start(self) -> None: ...
    def kill(self) -> None: ...
    def command(self, *command: str | bytes | int) -> object: ...


class Processes:
    def __init__(self, root: Path) -> None:
        self.root = root
        self._all: list[subprocess.Popen[str]] = []

    def start_manager(self, url: str, **settings: str) -> subprocess.Popen[str]:
        usual = {
            "REDIS_URL": url,
            "SECRET": SECRET.root.decode(),
            "POOL_ROOT": str(self.root),
            "POOL_GRACE_S": "0.3",
            "FENCE_AFTER_S": "600",  # These workers do not announce themselves.
        }
        variables = {
            f"QUIRE_BLOCK_MANAGER_{name}": text for name, text in {**usual, **settings}.items()
        }
        return self._start([sys.executable, "-m", "services.block_manager"], variables)

    async def start_worker(self, url: str, worker_id: str) -> tuple[subprocess.Popen[str], str]:
        """A worker process, and the pool that it joined."""
        command = [sys.executable, "-c", WORKER, url, str(self.root), worker_id]
        process = self._start(command, {"OMP_NUM_THREADS": "1"})
        assert process.stdout is not None
        while line := await asyncio.to_thread(process.stdout.readline):
            match line.split():
                case ["pool", pool_id]:
                    return process, pool_id
        raise AssertionError(f"{worker_id} did not join: {process.communicate()[1]}")

    def end(self) -> None:
        for process in self._all:
            process.kill()
            process.communicate()

    def _start(self, command: list[str], variables: dict[str, str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            env={**os.environ, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._all.append(process)
        return process


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    processes = Processes(tmp_path / "pools")
    yield processes
    processes.end()


async def announced(url: str) -> Member:
    """The block manager's entry in the registry, once there is one."""
    found: list[Member] = []

    async def there() -> bool:
        try:
            registry = await RedisRegistry.connect(url, SECRET.registry_key)
        except BlockStoreError:
            return False
        try:
            found.extend(await registry.members())
        finally:
            await registry.close()
        return bool(found)

    await until(there)
    return found[0]


async def no_pools(processes: Processes, store: RedisStore) -> bool:
    return not pool_directories(processes.root) and not await store.pool_ids()


@pytest.fixture
async def store(valkey: Valkey) -> AsyncIterator[RedisStore]:
    store = await RedisStore.connect(valkey.url)
    yield store
    await store.close()


async def test_the_process_serves_reaps_and_ends_cleanly(
    valkey: Valkey, store: RedisStore, processes: Processes
) -> None:
    manager = processes.start_manager(valkey.url)
    worker, pool_id = await processes.start_worker(valkey.url, "decode-1")
    other, other_pool_id = await processes.start_worker(valkey.url, "decode-2")
    assert other_pool_id == pool_id
    member = await announced(valkey.url)
    assert (member.role, member.state) == ("block_manager", "serving")

    async with open_channel(member.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING

        stub = block_manager_pb2_grpc.BlockManagerStub(channel)
        (pool,) = (
            await stub.ListPools(
                pb.ListPoolsRequest(), metadata=proven(f"/{SERVICE}/ListPools", member.member_id)
            )
        ).pools
        assert (pool.pool_id, pool.num_held, pool.num_holders) == (pool_id, 6, 2)

        worker.kill()

        async def reaped() -> bool:
            return (await store.stats(pool_id)).worker_ids == ("decode-2",)

        killed_at = asyncio.get_running_loop().time()
        await until(reaped)
        reaped_after_s = asyncio.get_running_loop().time() - killed_at
        (audit,) = (
            await stub.Audit(
                pb.AuditRequest(), metadata=proven(f"/{SERVICE}/Audit", member.member_id)
            )
        ).pools
    # Tens of milliseconds, on a machine that has time for us.
    assert reaped_after_s < 2.0, reaped_after_s
    assert (audit.num_held, audit.num_cached, list(audit.violations)) == (3, 1, [])
    assert await store.match(pool_id, [b"decode-1".ljust(16)]) == 1

    await asyncio.to_thread(other.communicate, "")
    assert other.returncode == 0
    await until(lambda: no_pools(processes, store))
    manager.send_signal(signal.SIGTERM)
    _, log = await asyncio.to_thread(manager.communicate)
    assert manager.returncode == 0, log
    registry = await RedisRegistry.connect(valkey.url, SECRET.registry_key)
    assert await registry.members() == ()
    await registry.close()


async def test_a_server_that_comes_back_empty_is_served_anew(
    own_valkey: Valkey, processes: Processes
) -> None:
    """The old pool is removed once its worker has left."""
    manager = processes.start_manager(own_valkey.url)
    worker, old_pool_id = await processes.start_worker(own_valkey.url, "decode-1")
    await announced(own_valkey.url)
    own_valkey.kill()
    own_valkey.start()
    assert (await announced(own_valkey.url)).role == "block_manager"
    assert [found.pool_id for found in pool_directories(processes.root)] == [old_pool_id]
    worker.kill()
    store = await RedisStore.connect(own_valkey.url)
    await until(lambda: no_pools(processes, store))
    second, new_pool_id = await processes.start_worker(own_valkey.url, "decode-2")
    assert new_pool_id != old_pool_id
    second.kill()

    async def empty() -> bool:
        return await no_pools(processes, store)

    await until(empty)
    await store.close()
    assert manager.poll() is None


async def test_a_block_manager_without_a_store_does_not_start(
    tmp_path: Path, processes: Processes
) -> None:
    manager = processes.start_manager(f"unix://{tmp_path}/nobody.sock", REDIS_PATIENCE_S="0.2")
    _, log = await asyncio.to_thread(manager.communicate, timeout=LIMIT_S)
    assert manager.returncode == 2
    assert "nobody.sock" in log.splitlines()[-1]
    assert "Traceback" not in log
