"""A cached prefix that is copied from another host, against computing it again, by bandwidth.

    sudo python -m bench.pull [--shape 0.6b] [--tokens 2048] [--links loopback 1000 300 100]

A link in Mbit/s joins two hosts in network namespaces (the wire of tests/e2e/network.py); without
namespaces, the hosts are on the loopback device. One host computes a prompt; then the other one's
mover pulls it. Prints a markdown table: the time of the pull, its bandwidth, and the time of
computing the prompt. Each time is the shortest of some rounds.
"""

import asyncio
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.harness import markdown, one_of, options
from bench.load import Prompts
from bench.make_checkpoint import SHAPES, make_checkpoint
from blockstore.hashing import root_hash
from blockstore.redis_registry import RedisRegistry
from quire.async_client import AsyncClient
from quire.reports import Pool
from quire.sockets import living_sockets
from quire.types import Sampling
from services.gateway.workers.movers import Movers
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
            host.start("mover")
        for host in hosts:
            host.wait_for("mover", "source_joined")
        hosts[0].start("gateway", PORT=str(_GATEWAY_PORT), HTTP_PORT="none")
        hosts[0].wait_for("gateway", "gateway_listening")
        yield hosts


async def measure(
    hosts: list[Host], num_tokens: int, rounds: int
) -> tuple[Pool, list[float], list[float]]:
    """The pool, and the seconds of each round to pull a prompt and to compute it."""
    a, b = (host.wait_for("mover", "mover_ready")["pool_id"] for host in hosts)
    sockets = ",".join(f"unix:{path}" for path in living_sockets(hosts[0].run_dir))
    client = AsyncClient(f"{hosts[0].ip}:{_GATEWAY_PORT}", operations=sockets)
    while not await client.is_ready():  # noqa: ASYNC110 - another process becomes ready
        await asyncio.sleep(0.1)
    sampling = Sampling(temperature=0.0, max_tokens=2, ignore_eos=True)
    prompts = Prompts(0, vocab_size=380)
    await client.complete(prompts.draw(64), sampling)
    (found,) = [pool for pool in await client.pools() if pool.pool_id == a]
    registry = await RedisRegistry.connect(hosts[0].redis_url, _ROUTER_SECRET.registry_key)
    movers = Movers(_ROUTER_SECRET.rpc_key)
    movers.follow(await registry.members())
    pull_s, compute_s = list[float](), list[float]()
    root = root_hash(found.fingerprint, _ROUTER_SECRET.root, "")
    sampled = SamplingParams(0.0, 0, 1.0, 0.0, 1, 1)
    for number in range(rounds):
        prompt = prompts.draw(num_tokens)
        began = time.perf_counter()
        await client.complete(prompt, sampling, timeout_s=300)
        compute_s.append(time.perf_counter() - began)
        ticket = Ticket(
            "r",
            number,
            1,
            "h",
            0,
            pool_id=b,
            root_hash=root,
            prompt_token_ids=tuple(prompt),
            sampling=sampled,
        )
        began = time.perf_counter()
        await movers.pull(ticket, a, b)
        pull_s.append(time.perf_counter() - began)
    await client.close()
    await movers.close()
    await registry.close()
    return found, pull_s, compute_s


@dataclass(frozen=True)
class Options:
    shape: str = one_of(SHAPES, "0.6b")
    tokens: int = 2048
    links: tuple[str, ...] = (LOOPBACK, "1000", "300", "100")
    rounds: int = 2
    pool_memory: int = 768 << 20
    """The bytes of each host's pool."""


def main() -> None:
    asked = options(Options, __doc__)
    rows = []
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        checkpoint = make_checkpoint(Path(folder) / "model", SHAPES[asked.shape])
        for link in asked.links:
            here = Path(folder) / link
            here.mkdir()
            with running(checkpoint, here, asked.pool_memory, link) as hosts:
                pool, *seconds = asyncio.run(measure(hosts, asked.tokens, asked.rounds))
            megabytes = asked.tokens // pool.block_size * pool.block_bytes / 1e6
            pull_s, compute_s = map(min, seconds)
            times = f"{pull_s:.2f} s", f"{megabytes / pull_s:.0f} MB/s", f"{compute_s:.2f} s"
            rows.append([link, f"{megabytes:.0f} MB", *times])
    print(markdown(["link", "bytes", "pull", "bandwidth", "compute"], rows))


if __name__ == "__main__":
    main()
