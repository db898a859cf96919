"""A cached prefix that is copied from another host, against computing it again, by bandwidth.

    sudo python -m bench.pull [--shape 0.6b] [--tokens 2048] [--rates 0 1000 300 100]

Two hosts in network namespaces, on the wire of tests/e2e/network.py, which limits the rate (in
Mbit/s; 0: as fast as it goes). One host computes a prompt; then the other one's mover pulls it.
Prints a markdown table: the time of the pull, its share of what NIXL alone reaches on the same link
(the mover's probe), the time of computing the prompt, and what the gateway's router chooses.
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from bench.make_checkpoint import SHAPES, make_checkpoint
from blockstore.hashing import prefix_hashes, root_hash
from blockstore.memory_store import MemoryStore
from blockstore.records import PoolSpec
from blockstore.redis_registry import RedisRegistry
from blockstore.registry import Member
from quire.async_client import AsyncClient
from quire.sockets import living_sockets
from quire.types import Sampling
from services.common.runtime.secret import Secret
from services.gateway.scheduling.router import Pool, Router
from services.gateway.workers.movers import Movers
from services.gateway.workers.worker import Worker
from services.protocol.ticket import SamplingParams, Ticket
from tests.conftest import Valkey
from tests.e2e.hosts import SECRET, Host
from tests.e2e.network import ADDRESSES, Network

_REDIS_PORT, _GATEWAY_PORT = 7392, 7393
_ROUTER_SECRET = Secret(SECRET.encode())


@contextmanager
def running(checkpoint: Path, folder: Path, pool_memory: int, mbit: int) -> Iterator[list[Host]]:
    """Host a: a prefill worker, a decode worker, the gateway. Host b: a decode worker, for its
    pool. A mover on each."""
    network = Network()
    network.bytes_per_s = mbit * 1e6 / 8
    here = ADDRESSES["here"]
    options = ("--port", str(_REDIS_PORT), "--bind", here, "--protected-mode", "no")
    valkey, hosts = Valkey(folder, *options), list[Host]()
    try:
        valkey.start()
        for name in ("a", "b"):
            url, within = f"redis://{here}:{_REDIS_PORT}", network.within(name)
            settings = {"UCX_TLS": "tcp,self"}
            host = Host(
                name, folder, checkpoint, url, pool_memory, ADDRESSES[name], within, settings
            )
            hosts.append(host)
            host.start("block_manager")
            for role in ("prefill", "decode") if name == "a" else ("decode",):
                host.start(role)
            host.wait_for("decode", "worker_ready")
            host.start("mover", PROBE_SIZE="16MiB", PULL_TIMEOUT_S="120")
        for host in hosts:
            host.wait_for("mover", "source_joined")
        hosts[0].start("gateway", PORT=str(_GATEWAY_PORT), HTTP_PORT="none")
        hosts[0].wait_for("gateway", "gateway_listening")
        yield hosts
    finally:
        for host in hosts:
            host.stop()
        valkey.kill()
        network.close()


async def measure(hosts: list[Host], num_tokens: int) -> tuple[float, float, float, PoolSpec]:
    """Seconds to compute a prompt, seconds to pull it, the bandwidth of the probe, and the spec of
    the pool."""
    a, b = (host.wait_for("mover", "mover_ready")["pool_id"] for host in hosts)
    prompt = [random.Random(number).randrange(300, 380) for number in range(num_tokens)]
    sockets = ",".join(f"unix:{path}" for path in living_sockets(hosts[0].run_dir))
    client = AsyncClient(f"{hosts[0].ip}:{_GATEWAY_PORT}", operations=sockets)
    while not await client.is_ready():  # noqa: ASYNC110 - another process becomes ready
        await asyncio.sleep(0.1)
    sampling = Sampling(temperature=0.0, max_tokens=2, ignore_eos=True)
    await client.complete(prompt[:64], sampling)
    began = time.perf_counter()
    await client.complete(prompt, sampling, timeout_s=300)
    compute_s = time.perf_counter() - began
    (found,) = [pool for pool in await client.pools() if pool.pool_id == a]
    await client.close()
    registry = await RedisRegistry.connect(hosts[0].redis_url, _ROUTER_SECRET.registry_key)
    movers = Movers(_ROUTER_SECRET.rpc_key)
    movers.follow(await registry.members())
    probe = movers.bandwidth(a, b)
    root = root_hash(found.fingerprint, _ROUTER_SECRET.root, "")
    sampled = SamplingParams(0.0, 0, 1.0, 0.0, 1, 1)
    ticket = Ticket("r", 1, 1, b, "h", 0, root, tuple(prompt), sampled)
    began = time.perf_counter()
    await movers.pull(ticket, a, b)
    pull_s = time.perf_counter() - began
    await movers.close()
    await registry.close()
    spec = PoolSpec(
        *(a, found.model, found.fingerprint, found.num_blocks, found.block_size, found.block_bytes)
    )
    return compute_s, pull_s, probe, spec


async def choice(spec: PoolSpec, num_tokens: int, compute_s: float, bandwidth: float) -> str:
    """The router's choice for a prompt that pool a has cached, when only pool b has slots."""
    store, prompt = MemoryStore(), tuple(range(num_tokens))
    hashes = prefix_hashes(root_hash(spec.fingerprint, b"s", ""), prompt, spec.block_size)
    other = replace(spec, pool_id="other")
    for each in (spec, other):
        await store.register_pool(each)
    await store.register_worker(spec, "w")
    number = len(hashes)
    given = await store.allocate(spec.pool_id, "h", "w", 1, hashes, number)
    await store.commit(spec.pool_id, "h", 1, list(zip(given.block_ids, hashes, strict=True)))
    worker = Worker(Member("p", "prefill", "", "serving", 0, 1, "other"), lambda command: None)
    worker.prefill_ns_per_token = round(compute_s / num_tokens * 1e9)
    target = Pool(other, (worker,), ())
    router = Router(store, b"s", lambda source, target: bandwidth)
    seen = [target, Pool(spec, (), ())]
    request = SimpleNamespace(prompt_token_ids=prompt, cache_salt="", adapter=None)
    (route, *_) = await router.routes(request, [target], seen)
    return "pull" if route.source_pool_id else "compute"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.pull")
    parser.add_argument("--shape", default="0.6b")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rates", type=int, nargs="+", default=[0, 1000, 300, 100])
    parser.add_argument("--pool-memory", type=int, default=768 << 20)
    asked = parser.parse_args()
    print("| link | bytes | pull | of NIXL alone | compute | the gateway chooses |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        checkpoint = make_checkpoint(Path(folder) / "model", SHAPES[asked.shape])
        for rate in asked.rates:
            here = Path(folder) / str(rate)
            here.mkdir()
            with running(checkpoint, here, asked.pool_memory, rate) as hosts:
                measured = asyncio.run(measure(hosts, asked.tokens))
            compute_s, pull_s, probe, spec = measured
            num_bytes = asked.tokens // spec.block_size * spec.block_bytes
            chosen = asyncio.run(choice(spec, asked.tokens, compute_s, probe))
            link = f"{rate} Mbit/s" if rate else "no limit"
            share = f"{num_bytes / pull_s / probe:.0%}"
            row = (link, f"{num_bytes / 1e6:.0f} MB", f"{pull_s:.2f} s", share)
            print("|", " | ".join((*row, f"{compute_s:.2f} s", chosen)), "|", flush=True)


if __name__ == "__main__":
    main()
