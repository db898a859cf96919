"""How much of reserved KV memory holds KV, with paging and without, as the PagedAttention paper's
Figure 2 has it.

    python -m bench.paging [--trace sharegpt alpaca] [--slots 15728] [--svg FILE]

Requests like the paper's (`bench/kv/traces.py`) are replayed through continuous batching on a
memory of `--slots` token slots: 15,728 is what OPT-13B has on an A100 with 40 GB (12 GiB at 800 KiB
a token; Table 1). All are in line from the start, and let in in order.

paged       blocks that Quire's block store hands out (`MemoryStore`), asked for as its workers ask:
            ceil((length + 1) / block size) at the admission, then 8 tokens ahead
contiguous  one piece for each request: of the longest possible request (2048); of its prompt and
            the power of two above its output; of exactly what it will need, which nobody knows

Prints markdown tables. *KV*: share of the reserved slots that hold KV, of all steps; *at the peak*:
at the step that held most KV. What is wasted is told apart: with paging *tail*, the rest of blocks
that hold some KV, and *look-ahead*, blocks that hold none yet; without, slots *for later* tokens,
and those *never used*. *At once*: requests that run, on average. No figure depends on the machine.
"""

import argparse
import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from advisor.advice import BLOCK_SIZES
from advisor.workload import RecordedRequest
from bench.kv.chart import Bar, stacked
from bench.kv.contiguous import ContiguousMemory
from bench.kv.simulation import Outcome, PagedMemory, simulate
from bench.kv.traces import CONTEXT, TRACES, Trace
from bench.serving.report import markdown

CONTIGUOUS: dict[str, Callable[[RecordedRequest], int]] = {
    "longest possible": lambda _: CONTEXT,
    "power of two": lambda asked: min(CONTEXT, asked.num_prompt_tokens + _power_of_two(asked)),
    "exact": lambda asked: asked.num_tokens,
}


def _power_of_two(asked: RecordedRequest) -> int:
    """At least the output."""
    return int(1 << (asked.num_generated_tokens - 1).bit_length())


async def paged(asked: Sequence[RecordedRequest], num_slots: int, block_size: int) -> Outcome:
    return await simulate(asked, await PagedMemory.of(num_slots, block_size, CONTEXT))


def row(name: str, outcome: Outcome) -> list[str]:
    shares = (outcome.utilization, outcome.utilization_at_peak, *outcome.wasted)
    return [
        name,
        *(f"{100 * share:.1f} %" for share in shares),
        f"{outcome.mean_running:.1f}",
        f"{outcome.requests_per_1000_steps:.1f}",
        f"{outcome.num_preemptions:,}",
    ]


def header(name: str, waste_kinds: tuple[str, str]) -> list[str]:
    return [
        name,
        "KV",
        "at the peak",
        *waste_kinds,
        "at once",
        "requests / 1,000 steps",
        "preempted",
    ]


def bar(name: str, outcome: Outcome, waste_kinds: tuple[str, str]) -> Bar:
    shares = zip(("KV", *waste_kinds), (outcome.utilization, *outcome.wasted), strict=True)
    return Bar(name, dict(shares))


async def simulated(trace: Trace, args: argparse.Namespace) -> list[Bar]:
    """Print the tables of one trace; the bars of its chart."""
    asked = trace.requests(args.requests, args.seed)
    rows, bars = [], []
    for name, reserve in CONTIGUOUS.items():
        outcome = await simulate(asked, ContiguousMemory(args.slots, reserve))
        rows.append(row(name, outcome))
        bars.append(bar(name.replace(" ", "\n", 1), outcome, ContiguousMemory.waste_kinds))
    print(
        markdown(header(f"{trace.name}, contiguous", ContiguousMemory.waste_kinds), rows),
        end="\n\n",
    )
    rows = []
    for block_size in args.block_sizes:
        outcome = await paged(asked, args.slots, block_size)
        rows.append(row(f"{block_size}", outcome))
        bars.append(bar(f"blocks\nof {block_size}", outcome, PagedMemory.waste_kinds))
    print(markdown(header(f"{trace.name}, block size", PagedMemory.waste_kinds), rows), end="\n\n")
    return bars


async def simulate_all(args: argparse.Namespace) -> None:
    for name in args.trace:
        bars = await simulated(TRACES[name], args)
        if args.svg:
            title = f"Reserved KV memory, {TRACES[name].name} lengths"
            path = args.svg.with_stem(f"{args.svg.stem}-{name}")
            path.write_text(stacked(title, bars))
            print(f"{path}\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", choices=TRACES, nargs="+", default=list(TRACES))
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--slots", type=int, default=15_728)
    parser.add_argument("--block-sizes", type=int, nargs="+", default=BLOCK_SIZES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--svg", type=Path, metavar="FILE", help="a chart for each trace")
    asyncio.run(simulate_all(parser.parse_args()))


if __name__ == "__main__":
    main()
