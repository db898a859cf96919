"""What a deployment does with more load than it can carry: how many requests are done by their
deadline, how soon the others are told, and whether memory grows.

    python -m bench.overload [--seconds 120] [--times 5] [--seed 1]

Starts `quire serve` with the embedded model by itself. Clients that ask again as soon as they are
answered find the capacity; requests at random times (Poisson, seeded) then offer parts and
multiples of it. A tenth of them come from a process of its own (`bench.overload_client`), where
nothing else is done: how long a refusal takes there is told apart. Prints a markdown table.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from bench.overload_client import BEGINS, GOOD, LATE, REFUSED, request
from quire.async_client import AsyncClient
from quire.errors import DeadlineExceeded, Overloaded
from tests.e2e.deployment import Deployment, serving

NUM_CLIENTS = 32
NUM_SLOTS = 16
DEADLINE_IN_SERVICE_TIMES = 4.0
SHARE_APART = 0.1
"""Of the requests, from a process of its own."""


@dataclass
class Tally:
    """Of one load; times in seconds. `elapsed_s`: until the last request was answered;
    `apart_s`: the refusals of the client that has a process of its own."""

    elapsed_s: float = 0.0
    num_offered: int = 0
    num_good: int = 0
    num_late: int = 0
    refusals_s: list[float] = field(default_factory=list)
    apart_s: list[float] = field(default_factory=list)

    def add(self, answers: Sequence[tuple[str, float]]) -> None:
        """What the other process was answered."""
        outcomes = [outcome for outcome, _ in answers]
        self.num_offered += len(outcomes)
        self.num_good += outcomes.count(GOOD)
        self.num_late += outcomes.count(LATE)
        self.apart_s += [seconds for outcome, seconds in answers if outcome == REFUSED]


async def ask(
    clients: Sequence[AsyncClient], tally: Tally, rng: random.Random, deadline_s: float
) -> None:
    client = rng.choice(clients)
    asked = request(rng)
    tally.num_offered += 1
    began = time.perf_counter()
    try:
        async for _ in client.send(asked, deadline_s):
            pass
    except Overloaded:
        tally.refusals_s.append(time.perf_counter() - began)
    except DeadlineExceeded:
        tally.num_late += 1
    else:
        tally.num_good += 1


async def capacity(
    clients: Sequence[AsyncClient], rng: random.Random, seconds: float
) -> tuple[float, float]:
    """Requests a second with every slot taken, and how long one takes then."""
    tally, until = Tally(), time.perf_counter() + seconds

    async def one_after_another() -> None:
        while time.perf_counter() < until:
            await ask(clients, tally, rng, 60.0)

    began = time.perf_counter()
    await asyncio.gather(*(one_after_another() for _ in range(NUM_SLOTS)))
    rate = tally.num_good / (time.perf_counter() - began)
    return rate, NUM_SLOTS / rate


async def offer(
    clients: Sequence[AsyncClient],
    rng: random.Random,
    rate: float,
    seconds: float,
    deadline_s: float,
) -> Tally:
    """Requests at random times; waits until the last one is answered."""
    tally = Tally()
    apart = await client_apart(
        clients[0].address, SHARE_APART * rate, seconds, deadline_s, rng.randrange(1 << 31)
    )
    due = now = time.perf_counter()
    until = now + seconds
    async with asyncio.TaskGroup() as tasks:
        answers = tasks.create_task(apart.communicate())
        while (due := due + rng.expovariate((1 - SHARE_APART) * rate)) < until:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.create_task(ask(clients, tally, rng, deadline_s))
    tally.elapsed_s = time.perf_counter() - now
    output, _ = answers.result()
    tally.add([(outcome, seconds) for outcome, seconds in json.loads(output)])
    return tally


async def client_apart(
    address: str, rate: float, seconds: float, deadline_s: float, seed: int
) -> asyncio.subprocess.Process:
    """Returns when it begins."""
    arguments = map(str, (address, rate, seconds, deadline_s, seed))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.overload_client", *arguments),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    if await process.stdout.readline() != BEGINS:
        raise RuntimeError("the client in a process of its own does not begin")
    return process


def memory_mib(deployment: Deployment) -> float:
    """Of all its processes, without what they share."""
    total_kib = 0
    for pid in deployment.children():
        status = Path(f"/proc/{pid}/status").read_text()
        line = next((ln for ln in status.splitlines() if ln.startswith("RssAnon")), "RssAnon: 0 kB")
        total_kib += int(line.split()[1])
    return total_kib / 1024


def row(name: str, tally: Tally, seconds: float, memory: float) -> str:
    refused, apart = sorted(tally.refusals_s), sorted(tally.apart_s)
    return (
        f"| {name} | {tally.num_offered / seconds:.1f} | {tally.num_good / tally.elapsed_s:.1f} "
        f"| {tally.num_late} | {len(refused)} | {_spread(refused)} | {len(apart)} "
        f"| {_spread(apart)} | {memory:.0f} |"
    )


def _spread(ordered: Sequence[float]) -> str:
    return " | ".join(_at(ordered, share) for share in (0.5, 0.99, 1.0))


def _at(ordered: Sequence[float], share: float) -> str:
    if not ordered:
        return "-"
    return f"{1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]:.1f}"


async def measure(deployment: Deployment, args: argparse.Namespace) -> None:
    rng = random.Random(args.seed)
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(AsyncClient(deployment.address))
            for _ in range(NUM_CLIENTS)
        ]
        await capacity(clients, rng, 3.0)
        rate, service_s = await capacity(clients, rng, args.warm_up)
        deadline_s = DEADLINE_IN_SERVICE_TIMES * service_s
        print(
            f"Capacity {rate:.1f} requests/s, {NUM_SLOTS} at a time, {service_s:.2f} s each; "
            f"deadline {deadline_s:.2f} s.\n"
        )
        print(
            "| load | offered/s | good/s | late | refused | refusal p50, ms | p99 | max "
            "| apart | p50, ms | p99 | max | memory, MiB |\n|---|" + "---:|" * 12
        )
        for times in (0.5, 0.8, 1.0, 1.2, 2.0, args.times):
            seconds = args.seconds if times == args.times else args.seconds / 6
            tally = await offer(clients, rng, times * rate, seconds, deadline_s)
            print(row(f"{times:g} x", tally, seconds, memory_mib(deployment)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=120.0, help="of the greatest load")
    parser.add_argument("--times", type=float, default=5.0, help="the greatest load")
    parser.add_argument("--warm-up", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    options = ("--max-num-seqs", str(NUM_SLOTS))
    with (
        tempfile.TemporaryDirectory() as folder,
        serving("embedded", Path(folder), *options) as deployment,
    ):
        asyncio.run(measure(deployment, args))


if __name__ == "__main__":
    main()
