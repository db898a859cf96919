"""Two hosts with two pools each, on a network that loses, delays and drops packets.

    host a: pool a1, 2 prefill ─┐                ┌─ pool b1, decode :host b
            pool a2, decode    ─┴─── network ────┴─ pool b2, decode
                                        │
                                Redis, of no host

Each request's KV is pulled from a1: to a2 while that has slots, else across the network. Every pool
has a block manager and a mover. Every host has a gateway, which its users reach by a Unix socket.
A process that ends is started again.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from pathlib import Path

from quire.async_client import AsyncClient
from quire.sockets import living_sockets
from tests.chaos.harness import inject_faults
from tests.chaos.limits import RECOVERY_S
from tests.chaos.model import chaos_model
from tests.chaos.operator import Operator
from tests.chaos.processes import worker_ids
from tests.chaos.redis_server import RedisServer
from tests.chaos.report import Report
from tests.chaos.schedule import Fault, schedule
from tests.e2e.hosts import Host
from tests.e2e.network import ADDRESSES, Network
from tests.waiting import until

POOLS = {
    "a1": ("prefill-1", "prefill-2"),
    "a2": ("decode-1",),
    "b1": ("decode-1",),
    "b2": ("decode-1",),
}
GATEWAYS = ("a1", "b1")
REDIS_PORT = 7390
POOL_MEMORY = 16 << 20
MOVER = {"LOG_LEVEL": "debug", "LEASE_S": "3", "PULL_TIMEOUT_S": "4"}
SETTINGS = {
    "mover": MOVER,
    "decode": {"MAX_NUM_SEQS": "6"},
    "gateway": {"PORT": "7391", "HTTP_PORT": "none", "PATIENCE_S": "60"},
}
STEPS = ("claimed", "allocated", "stamps_read", "blocks_read", "committed")
REGISTERED = ("prefill", "decode", "mover")

_ROLES = {
    "kill": (*REGISTERED, "gateway", "block_manager", "redis"),
    "stop": (*REGISTERED, "block_manager", "redis"),
    "kill_in_pull": ("mover",),
    "degrade": ("network",),
    "throttle": ("network",),
    "cut": ("network",),
    "disconnect": ("redis",),
    "partition": ("network",),
    "partition_redis": ("network",),
    "flush": ("redis",),
}
FAULT_KINDS = tuple(f"{verb} {role}" for verb, roles in _ROLES.items() for role in roles)
"""A mover is killed at a step of a pull (kill_in_pull). The network between the hosts loses and
delays packets (degrade), is slow (throttle), drops all packets one way (cut) or both ways
(partition); or one host does not reach Redis (partition_redis)."""


class NetworkFaults:
    """Faults of the network between the hosts, one at a time."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._ongoing: asyncio.Task[None] | None = None

    async def inject(self, fault: Fault) -> str:
        await self.until_healed()
        network, hosts = self._network, ("a", "b") if fault.which < 0.5 else ("b", "a")
        match fault.verb:
            case "degrade":
                network.loss, network.delay_s = 0.05 * fault.which, 0.05 * fault.which
            case "throttle":
                network.bytes_per_s = 50_000 + 2e6 * fault.which
            case "cut":
                network.blocked = {hosts}
            case "partition":
                network.blocked = {hosts, hosts[::-1]}
            case "partition_redis":
                network.blocked = {(hosts[0], "here"), ("here", hosts[0])}
        self._ongoing = asyncio.create_task(self._heal(fault.length_s))
        return f"{hosts[0]} for {fault.length_s:g} s"

    async def until_healed(self) -> None:
        if self._ongoing is not None:
            await self._ongoing

    async def _heal(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        self._network.heal()


class Hosts:
    """The processes of all hosts. Use as a context."""

    def __init__(self, folder: Path, network: Network, redis_url: str) -> None:
        model = chaos_model(folder)
        self.pools = {
            name: Host(
                name,
                folder,
                model,
                redis_url,
                POOL_MEMORY,
                ADDRESSES[name[0]],
                within=network.within(name[0]),
                settings={"UCX_TLS": "tcp,self"},
            )
            for name in POOLS
        }
        self._stopped: dict[int, asyncio.TimerHandle] = {}
        self._restarting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return when the gateways listen."""
        for name, workers in POOLS.items():
            for process in ("block_manager", *workers, "mover"):
                self._start(name, process)
        for name in GATEWAYS:
            self._start(name, "gateway")
        for name in GATEWAYS:
            await asyncio.to_thread(self.pools[name].wait_for, "gateway", "gateway_listening")
        self._restarting = asyncio.create_task(self._restart_ended())

    def _start(self, pool: str, name: str) -> None:
        service = name.partition("-")[0]
        self.pools[pool].start(service, name, **SETTINGS.get(service, {}))

    async def _restart_ended(self) -> None:
        while True:
            for name, host in self.pools.items():
                for service, process in tuple(host.processes.items()):
                    if process.poll() is not None:
                        self._start(name, service)
            await asyncio.sleep(0.05)

    def close(self) -> None:
        if self._restarting is not None:
            self._restarting.cancel()
        for pid, timer in tuple(self._stopped.items()):
            timer.cancel()
            self._resume(pid)
        for host in self.pools.values():
            host.stop()

    @property
    def sockets(self) -> str:
        """The gateways' sockets, with commas between them."""
        paths = [path for name in GATEWAYS for path in living_sockets(self.pools[name].run_dir)]
        return ",".join(f"unix:{path}" for path in paths)

    def pids(self, role: str) -> list[int]:
        """The pids of its processes that run and are not stopped."""
        return [
            process.pid
            for host in self.pools.values()
            for name, process in host.processes.items()
            if name.partition("-")[0] == role
            and process.poll() is None
            and process.pid not in self._stopped
        ]

    def number(self, role: str) -> int:
        """The number of its processes when all run."""
        names = [name for host in self.pools.values() for name in host.processes]
        return sum(name.partition("-")[0] == role for name in names)

    def inject(self, fault: Fault, pid: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP if fault.verb == "stop" else signal.SIGKILL)
        if fault.verb == "stop":
            loop = asyncio.get_running_loop()
            self._stopped[pid] = loop.call_later(fault.length_s, self._resume, pid)

    def _resume(self, pid: int) -> None:
        del self._stopped[pid]
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


class SeveralHosts:
    """The deployment on two hosts, into which faults are injected."""

    def __init__(
        self, hosts: Hosts, network: Network, redis: RedisServer, operator: Operator
    ) -> None:
        self._hosts = hosts
        self._network_faults = NetworkFaults(network)
        self.network = network
        self._redis = redis
        self.operator = operator

    async def inject(self, fault: Fault) -> str:
        if fault.role == "network":
            return await self._network_faults.inject(fault)
        if fault.role == "redis":
            await self._redis.until_running()
            await self.operator.until_audited(0)
            return await self._redis.inject(fault)
        await self._until_healthy(fault.role)
        if fault.verb == "kill_in_pull":
            return await self._kill_in_pull(fault)
        pids = self._hosts.pids(fault.role)
        pid = pids[int(fault.which * len(pids))]
        self._hosts.inject(fault, pid)
        return str(pid)

    async def _kill_in_pull(self, fault: Fault) -> str:
        """Kill the mover that reaches a step first, or the one from whose pool it reads; any mover
        after a second without pulls."""
        step = STEPS[int(fault.which * len(STEPS))]
        logs = {name: host.log("mover") for name, host in self._hosts.pools.items()}
        seen = {name: log.stat().st_size for name, log in logs.items()}
        text, until = f'"{step}"'.encode(), asyncio.get_running_loop().time() + 1.0
        while asyncio.get_running_loop().time() < until:
            for name, log in logs.items():
                with log.open("rb") as lines:
                    lines.seek(seen[name])
                    if text in lines.read():
                        self._hosts.pools[name].processes["mover"].kill()
                        return f"mover of {name} at {step}"
            await asyncio.sleep(0.002)
        pids = self._hosts.pids("mover")
        self._hosts.inject(fault, pids[int(fault.which * len(pids))])
        return "a mover without pulls"

    async def until_recovered(self) -> None:
        """Wait until the network is healed, all processes are healthy, an audit followed every
        fault, and no block is held in any of the pools."""
        await self._network_faults.until_healed()
        await self._redis.until_running()
        await self.operator.until_audited(0)
        await self.until_healthy()
        await self.operator.until_nothing_held(len(POOLS))
        await self.operator.note_fault()
        await self.operator.until_audited(0)

    async def until_healthy(self) -> None:
        for role in ("block_manager", "gateway", *REGISTERED):
            await self._until_healthy(role)

    async def _until_healthy(self, role: str) -> None:
        what = f"not every {role} is healthy"
        await until(lambda: self._are_healthy(role), limit_s=RECOVERY_S, explain=lambda: what)

    async def _are_healthy(self, role: str) -> bool:
        pids = self._hosts.pids(role)
        if len(pids) < self._hosts.number(role):
            return False
        if role not in REGISTERED:
            return True
        workers = await self.operator.call(AsyncClient.workers)
        ids = {worker.worker_id for worker in workers or () if worker.state == "serving"}
        return all(worker_ids(pid) & ids for pid in pids)


@asynccontextmanager
async def deployed(folder: Path, seed: int = 0) -> AsyncIterator[tuple[Hosts, SeveralHosts]]:
    """The hosts, when all their processes are healthy. `folder`: for their logs."""
    options = ("--port", str(REDIS_PORT), "--bind", ADDRESSES["here"], "--protected-mode", "no")
    async with AsyncExitStack() as stack:
        network = stack.enter_context(closing(Network(seed)))
        redis = stack.enter_context(closing(RedisServer(folder, *options)))
        url = f"redis://{ADDRESSES['here']}:{REDIS_PORT}"
        hosts = stack.enter_context(closing(Hosts(folder, network, url)))
        await hosts.start()
        operator = Operator(hosts.sockets)
        stack.push_async_callback(operator.close)
        system = SeveralHosts(hosts, network, redis, operator)
        await system.until_healthy()
        yield hosts, system


async def run_chaos(
    folder: Path,
    seed: int,
    duration_s: float | None,
    kinds: Sequence[str] = FAULT_KINDS,
    num_cases: int | None = None,
) -> Report:
    """Start the hosts, record their undisturbed outputs, then inject faults for `duration_s`; None:
    one fault of each kind."""
    report = Report(seed)
    async with deployed(folder, seed) as (hosts, system):
        faults = schedule(seed, kinds, once=duration_s is None)
        await inject_faults(
            report, hosts.sockets, system.operator, system, faults, duration_s, num_cases
        )
        for host in hosts.pools.values():
            for name in host.processes:
                report.read_log(host.log(name))
    return report
