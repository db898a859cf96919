"""Overloads a deployment: how many requests are done by their deadline, how soon the others are
refused, and whether memory grows.

    python -m bench.overload [--seconds 120] [--times 5] [--seed 1]

Starts `quire serve` with the demo model by itself. Clients that ask again as soon as they are
answered find the capacity; requests at random times (Poisson, seeded) then offer parts and
multiples of it. A tenth of them come from a `quire bench` of its own, where nothing else is done:
how long a refusal takes there is told apart. Prints a markdown table.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.serving.server import gateway_target
from quire.bench.load import Load
from quire.bench.options import WorkloadOptions
from quire.bench.prompts import Prompts
from quire.bench.record import percentile
from quire.bench.workload import Session, poisson, synthetic
from tests.e2e.deployment import Deployment, serving

SHAPE = WorkloadOptions(32, 256)
NUM_SLOTS = 16
DEADLINE_IN_SERVICE_TIMES = 4.0
REFUSED = ("overloaded", "queue_full")
SHARE_APART = 0.1
"""Of the requests, from a process of its own."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended: the kind of its error, if there was one, and the seconds until then."""

    error: str | None
    seconds: float


async def capacity(address: str, seed: int, seconds: float) -> float:
    """Requests a second with every slot taken."""
    target = gateway_target(address)
    load = Load(target, limit_s=seconds)
    sessions = synthetic(Prompts(seed, None), SHAPE)
    elapsed_s = await load.closed_loop(sessions, NUM_SLOTS, 0.0)
    await target.close()
    return (load.num_done - load.num_failed) / elapsed_s


async def offer(
    address: str, seed: int, rate: float, seconds: float, deadline_s: float
) -> tuple[list[Outcome], float]:
    """Requests at random times; returns how they ended, and after how long the last one had."""
    target = gateway_target(address, deadline_s)
    load = Load(target)
    elapsed_s = await load.open_loop(_timed(seed, rate, seconds))
    await target.close()
    return [Outcome(each.error, each.ended - each.sent) for each in load.records], elapsed_s


def _timed(seed: int, rate: float, seconds: float) -> Iterator[Session]:
    sessions = synthetic(Prompts(seed, None), SHAPE)
    for due, session in zip(poisson(rate, 0.0, seed), sessions, strict=False):
        if due >= seconds:
            return
        yield Session(session.turns, due)


async def offer_apart(
    address: str, seed: int, rate: float, seconds: float, deadline_s: float
) -> list[Outcome]:
    """The same from another process."""
    flags = {
        "address": address,
        "request-rate": rate,
        "num-requests": max(1, round(rate * seconds)),
        "timeout": deadline_s,
        "seed": seed,
        "prompts": "ids",
        "prompt-len": SHAPE.prompt_len,
        "output-len": SHAPE.output_len,
        "warmup": 0,
    }
    with tempfile.NamedTemporaryFile() as file:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "quire.cli", "bench", "--json-file", file.name),
            *(f"--{name}={value}" for name, value in flags.items()),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        await process.wait()
        answers = json.load(file)["requests"]
    return [Outcome(answer["error"], answer["e2e_ms"] / 1000) for answer in answers]


def memory_mib(deployment: Deployment) -> float:
    """The memory of all its processes, without shared memory."""
    total_kib = 0
    for pid in deployment.children():
        status = Path(f"/proc/{pid}/status").read_text()
        line = next((ln for ln in status.splitlines() if ln.startswith("RssAnon")), "RssAnon: 0 kB")
        total_kib += int(line.split()[1])
    return total_kib / 1024


def _refusals(outcomes: Sequence[Outcome]) -> str:
    """Their number, and percentiles of the time to them."""
    refused = sorted(1000 * each.seconds for each in outcomes if each.error in REFUSED)
    if not refused:
        return "0 | - | - | -"
    spread = (f"{percentile(refused, percent):.1f}" for percent in (50, 99, 100))
    return f"{len(refused)} | {' | '.join(spread)}"


async def measure(deployment: Deployment, args: argparse.Namespace) -> None:
    address = deployment.address
    await capacity(address, args.seed, 3.0)
    rate = await capacity(address, args.seed + 1, args.warm_up)
    deadline_s = DEADLINE_IN_SERVICE_TIMES * NUM_SLOTS / rate
    print(
        f"Capacity {rate:.1f} requests/s, {NUM_SLOTS} at a time, {NUM_SLOTS / rate:.2f} s each; "
        f"deadline {deadline_s:.2f} s.\n"
    )
    print(
        "| load | offered/s | good/s | late | other errors | refused | refusal p50, ms | p99 | max "
        "| apart | p50, ms | p99 | max | memory, MiB |\n|---|" + "---:|" * 13
    )
    for number, times in enumerate((0.5, 0.8, 1.0, 1.2, 2.0, args.times)):
        seconds = args.seconds if times == args.times else args.seconds / 6
        offered, seed = times * rate, args.seed + 2 * number + 2
        (here, elapsed_s), apart = await asyncio.gather(
            offer(address, seed, (1 - SHARE_APART) * offered, seconds, deadline_s),
            offer_apart(address, seed + 1, SHARE_APART * offered, seconds, deadline_s),
        )
        errors = [outcome.error for outcome in (*here, *apart)]
        good, late = errors.count(None), errors.count("timeout")
        refused = sum(error in REFUSED for error in errors)
        print(
            f"| {times:g} x | {len(errors) / seconds:.1f} | {good / elapsed_s:.1f} | {late} "
            f"| {len(errors) - good - late - refused} | {_refusals(here)} | {_refusals(apart)} "
            f"| {memory_mib(deployment):.0f} |",
            flush=True,
        )


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
        serving("demo", Path(folder), *options) as deployment,
    ):
        asyncio.run(measure(deployment, args))


if __name__ == "__main__":
    main()
