"""Goodput of split against aggregated serving on 1,000 simulated workers, FCALLs a second, and the
size of Redis.

    python -m bench.cluster TRACE [--speeds 10,20] [--prefill 6,7] [--aggregated 32x1,32x8]

TRACE is a file in Mooncake's format, which you download (`bench/cluster/trace.py`). A request is
good if its TTFT and its mean inter-token latency are within `--ttft` and `--inter-token`. Prints
markdown tables; with `--svg`, draws the goodput; with `--redis`, fills pools of as many blocks in a
Valkey of its own.
"""

import argparse
import asyncio
from collections import Counter
from collections.abc import Sequence
from math import ceil
from pathlib import Path

from bench.cluster.costs import CALL_US
from bench.cluster.plot import lines
from bench.cluster.simulate import Served, Shape, Simulation
from bench.cluster.store_size import bytes_a_block
from bench.cluster.trace import read

CHUNK = 512
HEARTBEATS_PER_S = 10


def goodput(served: Sequence[Served], ttft_s: float, inter_token_s: float) -> tuple[float, float]:
    """Good requests a second, and their share."""
    good = sum(one.ttft_s <= ttft_s and one.inter_token_s <= inter_token_s for one in served)
    return good / served[-1].request.arrived_s, good / len(served)


def calls(served: Sequence[Served], block_size: int, num_pools: int) -> Counter[str]:
    """FCALLs of the protocol for these requests: the gateway matches in every pool; prompts commit
    by chunks, generated tokens by blocks; claims and detaches count as other calls."""
    counts: Counter[str] = Counter()
    for one in served:
        blocks = ceil(one.request.num_generated_tokens / block_size)
        counts["allocate"] += 1
        counts["extend"] += blocks
        counts["commit"] += ceil(one.num_missing / CHUNK) + blocks
        counts["release"] += 1
        counts["match"] += num_pools
        counts["claim, detach"] += 2
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--speeds", default="5,10,15,20,25,30")
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--per-pool", type=int, default=8)
    parser.add_argument("--prefill", default="6,7", help="prefill workers of a pool")
    parser.add_argument(
        "--aggregated",
        default="16x1,32x1,64x1,256x1,32x8",
        help="prompt tokens in a step, and workers of a pool",
    )
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--ttft", type=float, default=30.0)
    parser.add_argument("--inter-token", type=float, default=0.1)
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--redis", action="store_true")
    options = parser.parse_args()
    tokens, workers = options.blocks * options.block_size, options.workers
    shapes = {
        f"split, {number} of {options.per_pool} prefill": Shape(
            workers, tokens, options.per_pool, int(number)
        )
        for number in options.prefill.split(",")
    } | {
        f"aggregated, chunks of {chunk}, pools of {per_pool}": Shape(
            workers, tokens, int(per_pool), 0, int(chunk)
        )
        for chunk, per_pool in (each.split("x") for each in options.aggregated.split(","))
    }
    print("| requests/s | " + " | ".join(shapes) + " |\n|---:|" + "---:|" * len(shapes))
    curves: dict[str, list[tuple[float, float]]] = {name: [] for name in shapes}
    for speed in map(float, options.speeds.split(",")):
        requests = read(options.trace, speed)
        rate, cells = len(requests) / requests[-1].arrived_s, []
        for name, shape in shapes.items():
            served = Simulation(shape).run(requests)
            good, share = goodput(served, options.ttft, options.inter_token)
            curves[name].append((rate, good))
            cells.append(f"{good:.1f} ({share:.0%})")
            if shape.num_prefill and name == next(iter(shapes)):
                split = served
        print(f"| {rate:.0f} | " + " | ".join(cells) + " |", flush=True)
    _print_calls(split, options)
    if options.svg:
        options.svg.write_text(lines("Good requests a second, of those that arrive", curves))
    if options.redis:
        print(f"Redis: {asyncio.run(bytes_a_block(options.blocks)):.0f} bytes a block")


def _print_calls(served: Sequence[Served], options: argparse.Namespace) -> None:
    num_pools, seconds = options.workers // options.per_pool, served[-1].request.arrived_s
    counts = calls(served, options.block_size, num_pools)
    counts["heartbeat"] = round(HEARTBEATS_PER_S * options.workers * seconds)
    print("\n| call | a second | of one CPU |\n|---|---:|---:|")
    total = 0.0
    for name, number in counts.items():
        share = number / seconds * CALL_US.get(name, CALL_US["other"]) / 1e6
        total += share
        print(f"| {name} | {number / seconds:,.0f} | {share:.0%} |")
    print(f"| all | {counts.total() / seconds:,.0f} | {total:.0%} |")


if __name__ == "__main__":
    main()
