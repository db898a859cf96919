"""The output of `quire bench`: its progress while it runs, and tables at the end."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from quire.cli.output import print_table

if TYPE_CHECKING:
    from quire.bench.load import Load

_REFRESH_S = 0.25
_LINE_S = 10.0
"""The time between two lines of progress where standard error is no terminal."""


@asynccontextmanager
async def live(load: "Load", name: str) -> AsyncIterator[None]:
    """Show how far a load is, on standard error: a bar on a terminal, elsewhere a line now and
    then."""
    console = Console(stderr=True)
    columns = (TextColumn(name), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task("", total=1.0 if load.share_done is not None else None)
        shown = _refresh(progress, task, load) if console.is_terminal else _lines(load, name)
        showing = asyncio.create_task(shown)
        try:
            yield
        finally:
            showing.cancel()
            with suppress(asyncio.CancelledError):
                await showing


async def _refresh(progress: Progress, task: TaskID, load: "Load") -> None:
    async for text in _states(load, _REFRESH_S):
        progress.update(task, completed=load.share_done or 0.0, description=text, refresh=True)


async def _lines(load: "Load", name: str) -> None:
    async for text in _states(load, _LINE_S):
        print(f"quire: {name}, {load.now:.0f} s: {text}", file=sys.stderr, flush=True)


async def _states(load: "Load", interval_s: float) -> AsyncIterator[str]:
    """The state of a load after each interval, with the tokens per second in it."""
    num_tokens, at = 0, 0.0
    while True:
        await asyncio.sleep(interval_s)
        now = load.now
        rate = (load.num_tokens - num_tokens) / max(now - at, 1e-9)
        num_tokens, at = load.num_tokens, now
        failed = f", {load.num_failed} failed" if load.num_failed else ""
        yield f"{load.num_done} done, {load.num_running} running{failed}, {rate:,.0f} tok/s"


def print_report(summary: dict[str, Any]) -> None:
    from quire.bench.report import FIGURES, latency_rows, totals
    from quire.bench.summary import warnings

    shown = totals(summary)
    width = max(map(len, shown))
    for name, value in shown.items():
        print(f"{name:<{width}}  {value}")
    print()
    columns = {"": lambda row: row[0]} | {
        figure.upper(): lambda row, index=index: row[1][index].rjust(9)
        for index, figure in enumerate(FIGURES)
    }
    print_table(columns, latency_rows(summary))
    for kind, number in summary["errors"].items():
        print(f"quire: {number} x {kind}: {summary['error_messages'][kind]}", file=sys.stderr)
    for text in warnings(summary):
        print(f"quire: {text}", file=sys.stderr)
