"""The output of `quire bench`: a line of progress while it runs, and tables at the end."""

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


@asynccontextmanager
async def live(load: "Load", num_requests: int | None) -> AsyncIterator[None]:
    """Show how far the load is, on standard error if that is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task("", total=num_requests)
        refreshing = asyncio.create_task(_refresh(progress, task, load))
        try:
            yield
        finally:
            refreshing.cancel()
            with suppress(asyncio.CancelledError):
                await refreshing


async def _refresh(progress: Progress, task: TaskID, load: "Load") -> None:
    num_tokens, at = 0, 0.0
    while True:
        await asyncio.sleep(_REFRESH_S)
        now = load.now
        rate = (load.num_tokens - num_tokens) / max(now - at, 1e-9)
        num_tokens, at = load.num_tokens, now
        failed = f", [red]{load.num_failed} failed[/]" if load.num_failed else ""
        text = f"{load.num_done} done, {load.num_running} running{failed}, {rate:,.0f} tok/s"
        progress.update(task, completed=load.num_done, description=text, refresh=True)


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
