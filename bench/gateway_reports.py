"""How busy a gateway's event loop is with the load reports of many workers.

    python -m bench.gateway_reports [--workers 100] [--pools 25] [--models 5] [--per-second 4]

The gateway is the real one, and its connections are simulated: each delivers a report a quarter of
a second, as a stream does. Prints the share of the time in which the process computes. Workers are
half prefill, half decode; no request runs.
"""

import asyncio
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry

from bench.counting_workers import member
from bench.harness import options
from bench.make_checkpoint import make_checkpoint
from blockstore.memory_store import MemoryStore
from blockstore.records import PoolSpec
from blockstore.registry import Load, Member, Role
from services.gateway.config import PartOptions
from services.gateway.request.metrics import RequestMeters
from services.gateway.wiring import start_gateway
from services.gateway.workers.connection import WorkerEventSink
from services.gateway.workers.worker import Worker
from services.protocol.messages import Command, LoadReport
from services.runtime.secret import Secret
from tests.memory_registry import MemoryRegistry

_MEASURED_S = 10.0


@dataclass(frozen=True, slots=True)
class Options:
    workers: int = 100
    pools: int = 25
    models: int = 5
    per_second: int = 4
    """The reports of each worker in a second."""


@dataclass
class SimulatedConnection:
    """The connection to a worker that reports its load and does nothing else."""

    worker: Worker
    sink: WorkerEventSink

    async def close(self) -> None: ...

    def report(self, number: int) -> None:
        load = Load(num_running=number % 7, num_free_slots=64 - number % 7)
        self.sink.on_event(self.worker, LoadReport(load))


async def measure(asked: Options, model_dir: str) -> float:
    store, registry = MemoryStore(), MemoryRegistry()
    connections: list[SimulatedConnection] = []

    def connect(member: Member, sink: WorkerEventSink) -> SimulatedConnection:
        def drop(command: Command) -> None: ...

        connections.append(SimulatedConnection(Worker(member, drop), sink))
        connections[-1].worker.connected = True
        return connections[-1]

    specs = [
        PoolSpec(f"pool-{n}", f"model-{n % asked.models}", "fingerprint", 1000, 16, block_bytes=1)
        for n in range(asked.pools)
    ]
    for spec in specs:
        await store.register_pool(spec)
    for number in range(asked.workers):
        role: Role = "decode" if number // asked.pools % 2 else "prefill"
        spec = specs[number % asked.pools]
        entry = member(role, f"worker-{number}", spec, model_dir, port=1, slots=64)
        await registry.announce(entry, 3600.0)
    metrics = RequestMeters(CollectorRegistry())
    secret = Secret(bytes(32))
    async with start_gateway(store, registry, secret, PartOptions(), metrics, connect) as wiring:
        while len(connections) < asked.workers:
            await wiring.changes.wait(wiring.changes.num_changes)
        began, used = time.perf_counter(), time.process_time()
        number = 0
        while (now := time.perf_counter() - began) < _MEASURED_S:
            while number < now * asked.per_second * asked.workers:
                connections[number % asked.workers].report(number)
                number += 1
            await asyncio.sleep(0.001)
        return (time.process_time() - used) / (time.perf_counter() - began)


def main() -> None:
    asked = options(Options, __doc__)
    with tempfile.TemporaryDirectory() as folder:
        model = make_checkpoint(Path(folder) / "model")
        share = asyncio.run(measure(asked, str(model)))
    print(f"{asked.workers} workers in {asked.pools} pools: the loop is busy for {share:.1%}")


if __name__ == "__main__":
    main()
