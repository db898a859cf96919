"""The output of `quire bench`: a line now and then while it runs, and tables at the end."""

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from quire.cli.output import print_table

if TYPE_CHECKING:
    from quire.bench.load import Load

_LINE_S = 10.0
"""The time between two lines of progress."""
_LATENCIES = {
    "ttft_ms": "Time to first token",
    "tpot_ms": "Time per output token",
    "itl_ms": "Inter-token latency",
    "e2e_ms": "End-to-end latency",
    "lateness_ms": "Schedule lateness",
}
_FIGURES = ("mean", "p50", "p90", "p99", "max")


@asynccontextmanager
async def live(load: "Load", name: str) -> AsyncIterator[None]:
    """Print now and then how far a load is, on standard error."""
    showing = asyncio.create_task(_show(load, name))
    try:
        yield
    finally:
        showing.cancel()
        with suppress(asyncio.CancelledError):
            await showing


async def _show(load: "Load", name: str) -> None:
    num_tokens, at = 0, 0.0
    while True:
        await asyncio.sleep(_LINE_S)
        now = load.now
        rate = (load.num_tokens - num_tokens) / max(now - at, 1e-9)
        num_tokens, at = load.num_tokens, now
        failed = f", {load.num_failed} failed" if load.num_failed else ""
        text = f"{load.num_done} done, {load.num_running} running{failed}, {rate:,.0f} tok/s"
        print(f"quire: {name}, {now:.0f} s: {text}", file=sys.stderr, flush=True)


def _latency_rows(summary: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Name and figures of each latency that was measured, in ms."""
    return [
        (f"{name} (ms)", [f"{summary[key][figure]:,.2f}" for figure in _FIGURES])
        for key, name in _LATENCIES.items()
        if summary[key] and (key != "lateness_ms" or summary[key]["max"] > 0)
    ]


def _totals(summary: Mapping[str, Any]) -> dict[str, str]:
    """The figures that are one number."""
    shown = {
        "Completed": f"{summary['num_completed']:,} of {summary['num_requests']:,}",
        **({"Cut off at the end": f"{summary['num_cut']:,}"} if summary["num_cut"] else {}),
        "Duration": f"{summary['duration_s']:,.2f} s",
        "Requests": f"{summary['request_throughput']:,.2f} req/s",
        "Output tokens": f"{summary['output_token_throughput']:,.1f} tok/s",
        "All tokens": f"{summary['total_token_throughput']:,.1f} tok/s",
        "Most at once": f"{summary['max_concurrency']:,}",
    }
    if summary["goodput"] is not None:
        slo = ", ".join(f"{name} {limit:g} ms" for name, limit in summary["slo_ms"].items())
        shown[f"Goodput ({slo})"] = f"{summary['goodput']:,.2f} req/s"
    return shown


def print_report(summary: dict[str, Any]) -> None:
    from quire.bench.summary import warnings

    shown = _totals(summary)
    width = max(map(len, shown))
    for name, value in shown.items():
        print(f"{name:<{width}}  {value}")
    print()
    columns = {"": lambda row: row[0]} | {
        figure.upper(): lambda row, index=index: row[1][index].rjust(9)
        for index, figure in enumerate(_FIGURES)
    }
    print_table(columns, _latency_rows(summary))
    for kind, number in summary["errors"].items():
        print(f"quire: {number} x {kind}: {summary['error_messages'][kind]}", file=sys.stderr)
    for text in warnings(summary):
        print(f"quire: {text}", file=sys.stderr)
