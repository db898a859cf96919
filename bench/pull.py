"""A cached prefix that is copied from another host, against computing it again, by bandwidth.

    sudo python -m bench.pull [--shape 0.6b] [--tokens 2048] [--links loopback 1000 300 100]

A link in Mbit/s joins two hosts in network namespaces (the wire of tests/e2e/network.py); without
namespaces, the hosts are on the loopback device. One host computes a prompt; then the other one's
mover pulls it. Prints a markdown table: how long NIXL alone takes for the same blocks on the same
link (`bench.nixl_alone`), the pull, what share of NIXL's bandwidth it reaches, the time of
computing the prompt, and what the gateway's router chooses. Each time is the shortest of some
rounds.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

from bench.make_checkpoint import SHAPES, make_checkpoint
from blockstore.hashing import prefix_hashes, root_hash
from blockstore.memory_store import MemoryStore
from blockstore.records import PoolSpec
from blockstore.redis_registry import RedisRegistry
from blockstore.registry import Member
from quire.async_client import AsyncClient
from quire.bench.prompts import Prompts
from quire.sockets import living_sockets
from quire.types import Sampling
from services.gateway.scheduling.router import Router
from services.gateway.workers.movers import Movers
from services.gateway.workers.pool import Pool
from services.gateway.workers.worker import Worker
from services.protocol.ticket import SamplingParams, Ticket
from services.runtime.secret import Secret
from tests.conftest import Valkey
from tests.e2e.hosts import SECRET, Host
from tests.e2e.network import ADDRESSES, Network

_REDIS_PORT, _GATEWAY_PORT = 21392, 21393
LOOPBACK = "loopback"
_UCX = {"UCX_TLS": "tcp,self"}
_ROUTER_SECRET = Secret(SECRET.encode())


@contextmanager
def running(checkpoint: Path, folder: Path, pool_memory: int, link: str) -> Iterator[list[Host]]:
    """Host a: a prefill worker, a decode worker, the gateway. Host b: a decode worker, for its
    pool. A mover on each."""
    with ExitStack() as stack:
        addresses = dict.fromkeys(ADDRESSES, "127.0.0.1")
        within: dict[str, Sequence[str]] = {"a": (), "b": ()}
        if link != LOOPBACK:
            network = Network()
            stack.callback(network.close)
            network.bytes_per_s = int(link) * 1e6 / 8
            addresses, within = ADDRESSES, {name: network.within(name) for name in ("a", "b")}
        url = f"redis://{addresses['here']}:{_REDIS_PORT}"
        options = ("--port", str(_REDIS_PORT), "--bind", addresses["here"], "--protected-mode")
        valkey = Valkey(folder, *options, "no")
        valkey.start()
        stack.callback(valkey.kill)
        hosts = list[Host]()
        for name in ("a", "b"):
            host = Host(name, folder, checkpoint, url, pool_memory, addresses[name], within[name])
            host.settings = _UCX
            hosts.append(host)
            stack.callback(host.stop)
            host.start("block_manager")
            for role in ("prefill", "decode") if name == "a" else ("decode",):
                host.start(role)
            host.wait_for("decode", "worker_ready")
            host.start("mover", PROBE_SIZE="16MiB")
        for host in hosts:
            host.wait_for("mover", "source_joined")
        hosts[0].start("gateway", PORT=str(_GATEWAY_PORT), HTTP_PORT="none")
        hosts[0].wait_for("gateway", "gateway_listening")
        yield hosts


@dataclass
class Measured:
    """Seconds to compute a prompt and to pull it, of each round; the bandwidth that the mover says;
    the pool."""

    compute_s: list[float]
    pull_s: list[float]
    bandwidth: float
    spec: PoolSpec


async def measure(hosts: list[Host], num_tokens: int, rounds: int) -> Measured:
    a, b = (host.wait_for("mover", "mover_ready")["pool_id"] for host in hosts)
    sockets = ",".join(f"unix:{path}" for path in living_sockets(hosts[0].run_dir))
    client = AsyncClient(f"{hosts[0].ip}:{_GATEWAY_PORT}", operations=sockets)
    while not await client.is_ready():  # noqa: ASYNC110 - another process becomes ready
        await asyncio.sleep(0.1)
    sampling = Sampling(temperature=0.0, max_tokens=2, ignore_eos=True)
    prompts = Prompts(0, None, vocab_size=380)
    await client.complete(prompts.draw(64), sampling)
    (found,) = [pool for pool in await client.pools() if pool.pool_id == a]
    spec = PoolSpec(
        *(a, found.model, found.fingerprint, found.num_blocks, found.block_size, found.block_bytes)
    )
    registry = await RedisRegistry.connect(hosts[0].redis_url, _ROUTER_SECRET.registry_key)
    movers = Movers(_ROUTER_SECRET.rpc_key)
    movers.follow(await registry.members())
    measured = Measured([], [], movers.bandwidth(a, b), spec)
    root = root_hash(found.fingerprint, _ROUTER_SECRET.root, "")
    sampled = SamplingParams(0.0, 0, 1.0, 0.0, 1, 1)
    for number in range(rounds):
        prompt = prompts.draw(num_tokens)
        assert isinstance(prompt, list)
        began = time.perf_counter()
        await client.complete(prompt, sampling, timeout_s=300)
        measured.compute_s.append(time.perf_counter() - began)
        ticket = Ticket(
            *("r", number, 1, "h", 0),
            pool_id=b,
            root_hash=root,
            prompt_token_ids=tuple(prompt),
            sampling=sampled,
        )
        began = time.perf_counter()
        await movers.pull(ticket, a, b)
        measured.pull_s.append(time.perf_counter() - began)
    await client.close()
    await movers.close()
    await registry.close()
    return measured


def nixl_alone(hosts: list[Host], spec: PoolSpec, num_blocks: int) -> float:
    """Seconds in which NIXL reads so many blocks from the one host to the other."""
    source, target = hosts
    command = [sys.executable, "-m", "bench.nixl_alone"]
    sizes, settings = (str(num_blocks), str(spec.block_bytes)), os.environ | _UCX
    with subprocess.Popen(
        [*source.within, *command, "serve", *sizes],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=settings,
    ) as server:
        assert server.stdout is not None
        description = next(line for line in server.stdout if line.startswith("["))
        reader = [*target.within, *command, "read", *sizes, description]
        found = subprocess.run(reader, stdout=subprocess.PIPE, text=True, env=settings, check=True)
        server.communicate()
    seconds: list[float] = json.loads(found.stdout.splitlines()[-1])
    return min(seconds)


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
    parser.add_argument("--links", nargs="+", default=[LOOPBACK, "1000", "300", "100"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--pool-memory", type=int, default=768 << 20)
    asked = parser.parse_args()
    print("| link | bytes | NIXL alone | pull | share | compute | the gateway chooses |")
    print("|---|---:|---:|---:|---:|---:|---|")
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        checkpoint = make_checkpoint(Path(folder) / "model", SHAPES[asked.shape])
        for link in asked.links:
            here = Path(folder) / link
            here.mkdir()
            with running(checkpoint, here, asked.pool_memory, link) as hosts:
                measured = asyncio.run(measure(hosts, asked.tokens, asked.rounds))
                num_blocks = asked.tokens // measured.spec.block_size
                alone_s = nixl_alone(hosts, measured.spec, num_blocks)
            compute_s, pull_s = min(measured.compute_s), min(measured.pull_s)
            chosen = asyncio.run(choice(measured.spec, asked.tokens, compute_s, measured.bandwidth))
            print(
                f"| {link} | {num_blocks * measured.spec.block_bytes / 1e6:.0f} MB "
                f"| {alone_s:.2f} s | {pull_s:.2f} s | {alone_s / pull_s:.0%} "
                f"| {compute_s:.2f} s | {chosen} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
