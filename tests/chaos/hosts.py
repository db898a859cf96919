"""Two hosts with two pools each, on a wire that loses, delays and cuts packets.

    host a: pool a1, 2 prefill ─┐                ┌─ pool b1, decode :host b
            pool a2, decode    ─┴───── wire ─────┴─ pool b2, decode
                                        │
                                Redis, of no host

So each request is pulled from a1: to a2 while that has slots, else across the wire. Every pool has
a block manager and a mover, every host a gateway, which its users reach without the wire. A process
that ends is started again.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from pathlib import Path

from quire.async_client import AsyncClient
from quire.sockets import living_sockets
from quire.supervisor.model_source import EMBEDDED, find_model
from tests.chaos.harness import disturb
from tests.chaos.limits import BACK_S
from tests.chaos.operator import Operator
from tests.chaos.processes import worker_ids
from tests.chaos.redis_server import RedisServer
from tests.chaos.report import Report
from tests.chaos.schedule import Event, schedule
from tests.e2e.hosts import Host
from tests.e2e.network import ADDRESSES, Network

POOLS = {
    "a1": ("prefill-1", "prefill-2"),
    "a2": ("decode-1",),
    "b1": ("decode-1",),
    "b2": ("decode-1",),
}
GATEWAYS = ("a1", "b1")
REDIS_PORT = 7390
POOL_MEMORY = 16 << 20
MOVER = {"LOG_LEVEL": "debug", "LEASE_S": "3", "PULL_TIMEOUT_S": "4", "LANDING_TIMEOUT_S": "2"}
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
    "strike": ("mover",),
    "disturb": ("wire",),
    "throttle": ("wire",),
    "cut": ("wire", "redis"),
    "part": ("wire",),
    "hide": ("wire",),
    "flush": ("redis",),
}
KINDS = tuple(f"{verb} {role}" for verb, roles in _ROLES.items() for role in roles)
"""A mover is struck (killed) at a step of a pull. The wire between the hosts loses and delays
packets (disturb), is slow (throttle), drops all packets one way (cut) or both ways (part); one
host does not reach Redis (hide)."""


class Wire:
    """One trouble at a time."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._trouble: asyncio.Task[None] | None = None

    async def suffer(self, event: Event) -> str:
        await self.healed()
        network, hosts = self._network, ("a", "b") if event.which < 0.5 else ("b", "a")
        match event.verb:
            case "disturb":
                network.loss, network.delay_s = 0.05 * event.which, 0.05 * event.which
            case "throttle":
                network.bytes_per_s = 50_000 + 2e6 * event.which
            case "cut":
                network.blocked = {hosts}
            case "part":
                network.blocked = {hosts, hosts[::-1]}
            case "hide":
                network.blocked = {(hosts[0], "here"), ("here", hosts[0])}
        self._trouble = asyncio.create_task(self._heal(event.length_s))
        return f"{hosts[0]} for {event.length_s:g} s"

    async def healed(self) -> None:
        if self._trouble is not None:
            await self._trouble

    async def _heal(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        self._network.heal()


class Hosts:
    """The processes of all hosts. Use as a context."""

    def __init__(self, folder: Path, network: Network, redis_url: str) -> None:
        model = find_model(EMBEDDED).directory
        self.pools = {
            name: Host(
                *(name, folder, model, redis_url, POOL_MEMORY, ADDRESSES[name[0]]),
                within=network.within(name[0]),
                settings={"UCX_TLS": "tcp,self"},
            )
            for name in POOLS
        }
        self._stopped: dict[int, asyncio.TimerHandle] = {}
        self._keeping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return when the gateways listen."""
        for name, workers in POOLS.items():
            for process in ("block_manager", *workers, "mover"):
                self._start(name, process)
        for name in GATEWAYS:
            self._start(name, "gateway")
        for name in GATEWAYS:
            await asyncio.to_thread(self.pools[name].wait_for, "gateway", "gateway_listening")
        self._keeping = asyncio.create_task(self._keep())

    def _start(self, pool: str, name: str) -> None:
        service = name.partition("-")[0]
        self.pools[pool].start(service, name, **SETTINGS.get(service, {}))

    async def _keep(self) -> None:
        while True:
            for name, host in self.pools.items():
                for service, process in tuple(host.processes.items()):
                    if process.poll() is not None:
                        self._start(name, service)
            await asyncio.sleep(0.05)

    def close(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
        for pid, timer in tuple(self._stopped.items()):
            timer.cancel()
            self._wake(pid)
        for host in self.pools.values():
            host.stop()

    @property
    def sockets(self) -> str:
        """Those of the gateways, with commas between them."""
        paths = [path for name in GATEWAYS for path in living_sockets(self.pools[name].run_dir)]
        return ",".join(f"unix:{path}" for path in paths)

    def pids(self, role: str) -> list[int]:
        """Those that live and do not stand still."""
        return [
            process.pid
            for host in self.pools.values()
            for name, process in host.processes.items()
            if name.partition("-")[0] == role
            and process.poll() is None
            and process.pid not in self._stopped
        ]

    def number(self, role: str) -> int:
        """How many there are when all are well."""
        names = [name for host in self.pools.values() for name in host.processes]
        return sum(name.partition("-")[0] == role for name in names)

    def hit(self, event: Event, pid: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP if event.verb == "stop" else signal.SIGKILL)
        if event.verb == "stop":
            loop = asyncio.get_running_loop()
            self._stopped[pid] = loop.call_later(event.length_s, self._wake, pid)

    def _wake(self, pid: int) -> None:
        del self._stopped[pid]
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


class SeveralHosts:
    """The system that events disturb."""

    def __init__(
        self, hosts: Hosts, network: Network, redis: RedisServer, operator: Operator
    ) -> None:
        self._hosts = hosts
        self._wire = Wire(network)
        self.network = network
        self._redis = redis
        self.operator = operator

    async def suffer(self, event: Event) -> str:
        if event.role == "wire":
            return await self._wire.suffer(event)
        if event.role == "redis":
            await self._redis.back()
            await self.operator.all_proven_but(0)
            return await self._redis.suffer(event)
        await self._until_well(event.role)
        if event.verb == "strike":
            return await self._strike(event)
        pids = self._hosts.pids(event.role)
        pid = pids[int(event.which * len(pids))]
        self._hosts.hit(event, pid)
        return str(pid)

    async def _strike(self, event: Event) -> str:
        """Kill the mover that reaches a step first, or the one from whose pool it reads; any one
        after a second without pulls."""
        step = STEPS[int(event.which * len(STEPS))]
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
        self._hosts.hit(event, pids[int(event.which * len(pids))])
        return "a mover without pulls"

    async def settle(self) -> None:
        """Wait until the wire is whole, all processes are well, every event is proven harmless, and
        nothing is held in any of the pools."""
        await self._wire.healed()
        await self._redis.back()
        await self.operator.all_proven_but(0)
        await self.until_well()
        await self.operator.until_empty(len(POOLS))
        await self.operator.happened()
        await self.operator.all_proven_but(0)

    async def until_well(self) -> None:
        for role in ("block_manager", "gateway", *REGISTERED):
            await self._until_well(role)

    async def _until_well(self, role: str) -> None:
        try:
            async with asyncio.timeout(BACK_S):
                while not await self._are_well(role):
                    await asyncio.sleep(0.1)
        except TimeoutError as error:
            raise TimeoutError(f"not every {role} came back") from error

    async def _are_well(self, role: str) -> bool:
        pids = self._hosts.pids(role)
        if len(pids) < self._hosts.number(role):
            return False
        if role not in REGISTERED:
            return True
        workers = await self.operator.ask(AsyncClient.workers)
        ids = {worker.worker_id for worker in workers or () if worker.state == "serving"}
        return all(worker_ids(pid) & ids for pid in pids)


@asynccontextmanager
async def deployed(folder: Path, seed: int = 0) -> AsyncIterator[tuple[Hosts, SeveralHosts]]:
    """The hosts, when all their processes are well. `folder`: for their logs."""
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
        await system.until_well()
        yield hosts, system


async def unleash(
    folder: Path,
    seed: int,
    duration_s: float,
    kinds: Sequence[str] = KINDS,
    num_cases: int | None = None,
) -> Report:
    """Start the hosts, record their undisturbed answers, then disturb them for `duration_s`."""
    report = Report(seed)
    async with deployed(folder, seed) as (hosts, system):
        events = schedule(seed, kinds)
        await disturb(
            *(report, hosts.sockets, system.operator, system, events, duration_s), num_cases
        )
        for host in hosts.pools.values():
            for name in host.processes:
                report.read_log(host.log(name))
    return report
