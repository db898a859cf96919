"""Measures a load that swings between long prompts and long answers, with fixed roles and with
workers that change their role (`--auto-roles`).

python -m bench.roles --model FILE [--phase 22] [--swings 2] [--prompts 1.2] [--answers 2.4]

Each worker computes on one thread of its own (`--threads 1`), as a worker on a GPU has a GPU of its
own: with the default, workers on CPUs lend each other idle CPUs, and roles matter little. A request
is good if its first token comes within `--ttft`, and its tokens are on average `--gap` apart at
most.
"""

import asyncio
import itertools
import re
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.harness import markdown, one_of, options
from bench.load import GrpcTarget, Prompts, Record, poisson, send_all
from quire.async_client import AsyncClient
from quire.types import Sampling
from tests.e2e.deployment import serving

SETUPS = {
    "2 prefill + 1 decode": ("2", "1"),
    "1 prefill + 2 decode": ("1", "2"),
    "3 that change": ("2", "1", "--auto-roles"),
}


@dataclass(frozen=True)
class Options:
    model: Path
    phase: float = 22.0
    """The seconds of a phase."""
    swings: int = 2
    """How often both phases come."""
    prompts: float = 1.2
    """Long prompts a second."""
    answers: float = 2.4
    """Long answers a second."""
    slots: int = 8
    """The decode slots of a worker."""
    ttft: float = 3.0
    gap: float = 0.05
    setup: tuple[str, ...] = one_of(SETUPS, tuple(SETUPS))


LONG_PROMPT, LONG_ANSWER = (1024, 8), (32, 160)
"""The tokens of prompt and answer in the two phases."""


async def swing(target: GrpcTarget, prompts: Prompts, args: Options) -> dict[str, list[Record]]:
    """Send the requests of all phases, each at its random time. Returns them by phase."""
    found: dict[str, list[Record]] = {"long prompts": [], "long answers": []}
    phases = (
        ("long prompts", args.prompts, LONG_PROMPT),
        ("long answers", args.answers, LONG_ANSWER),
    )
    sending = []
    for number, (name, rate, (length, num_tokens)) in enumerate(phases * args.swings):
        moments = poisson(rate, number)
        times = [*itertools.takewhile(lambda at: at < args.phase, moments)]
        drawn = [prompts.draw(length) for _ in times]
        due = [number * args.phase + at for at in times]
        sending.append((name, asyncio.create_task(send_all(target, drawn, num_tokens, times=due))))
    for name, task in sending:
        found[name] += await task
    return found


def is_good(record: Record, args: Options) -> bool:
    if record.error or record.ttft_s > args.ttft:
        return False
    gaps = record.num_tokens - 1
    return gaps < 1 or (record.arrivals[-1] - record.arrivals[0]) / gaps <= args.gap


def figures(records: Sequence[Record], args: Options) -> list[str]:
    whole = [record for record in records if not record.error]
    good = sum(is_good(record, args) for record in records)
    ttfts, seconds = sorted(each.ttft_s for each in whole), args.phase * args.swings
    return [
        f"{good / seconds:.2f} of {len(records) / seconds:.2f}",
        f"{statistics.median(ttfts):.2f}",
        f"{ttfts[int(0.9 * len(ttfts))]:.2f}",
        str(len(records) - len(whole)),
    ]


async def measure(setup: str, folder: Path, args: Options) -> list[list[str]]:
    prefill, decode, *options = SETUPS[setup]
    numbers = "--prefill", prefill, "--decode", decode, "--max-num-seqs", str(args.slots)
    with serving(args.model, folder, *numbers, "--pool-memory", "512MiB", *options) as deployment:
        client = AsyncClient(deployment.address, resume_window_s=0.0)
        target = GrpcTarget(client, Sampling(temperature=0.0, ignore_eos=True))
        try:
            found = await swing(target, Prompts(7, 40_000), args)
        finally:
            await target.close()
        changes = len(re.findall('"event": "role_changes"', deployment.log.read_text()))
    return [
        [setup, phase, *figures(records, args), str(changes)] for phase, records in found.items()
    ]


def main() -> None:
    args = options(Options, __doc__)
    rows = []
    for setup in args.setup:
        with tempfile.TemporaryDirectory() as folder:
            rows += asyncio.run(measure(setup, Path(folder), args))
    head = ["workers", "phase", "good req/s", "TTFT p50 s", "TTFT p90 s", "failed", "changes"]
    print(markdown(head, rows))


if __name__ == "__main__":
    main()
