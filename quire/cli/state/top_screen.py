"""The screen of `quire top`: a document of the dashboard's feed, as tables."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from quire.cli.state.dashboard_feed import Document
from quire.sizes import format_size
from quire.worker_names import worker_name

_NUM_REQUESTS = 20
_BAR_CELLS = 72
_FIGURES_PER_LINE = 5
_BLOCK_STYLES = {"held": "blue", "cached": "cyan", "free": "bright_black"}
_PHASE_STYLES = {"preempted": "red", "lost": "red", "moving": "magenta", "prefill": "yellow"}


def render(document: Document) -> RenderableType:
    """A document as a screen: figures, pools, workers, requests."""
    parts: list[RenderableType] = [_figures(document)]
    parts += [_pool(pool_id, pool) for pool_id, pool in sorted(document["pools"].items())]
    return Group(*parts, _workers(document["workers"]), _requests(document))


def _figures(document: Document) -> RenderableType:
    models = ", ".join(document["models"]) or "no model"
    figures = {
        "running": f"{document['num_running']:,}",
        "waiting for a token": f"{document['num_waiting']:,}",
        "oldest wait": f"{document['oldest_wait_ms'] / 1000:.1f} s",
        "ttft p50": _seconds(quantile(document["ttft"], 0.5)),
        "ttft p99": _seconds(quantile(document["ttft"], 0.99)),
        "token p50": _seconds(quantile(document["inter_token"], 0.5)),
        "token p99": _seconds(quantile(document["inter_token"], 0.99)),
        "tokens": f"{document['generated_tokens']:,.0f}",
        "preempted": f"{document['preemptions']:,.0f}",
        "moved": f"{document['moves']:,.0f}",
        "errors": f"{sum(document['failures'].values()):,.0f}",
    }
    table = Table.grid(padding=(0, 2))
    for line in _lines(figures):
        table.add_row(*(Text(name, style="bright_black") for name, _ in line))
        table.add_row(*(Text(value, style="bold") for _, value in line))
    state = "" if document["block_manager"] else "; the block manager does not answer"
    return Panel(table, title=f"Quire  {models}  {document['gateway']}{state}", title_align="left")


def _lines(figures: Mapping[str, str]) -> Iterator[list[tuple[str, str]]]:
    items = list(figures.items())
    for start in range(0, len(items), _FIGURES_PER_LINE):
        yield items[start : start + _FIGURES_PER_LINE]


def quantile(histogram: Mapping[str, Any], share: float) -> float | None:
    """Return the upper bound of the bucket in which this share of the values ends; None without
    any."""
    rest = share * sum(histogram["counts"])
    if not rest:
        return None
    for bound, count in zip([*histogram["bounds"], float("inf")], histogram["counts"], strict=True):
        rest -= count
        if rest <= 0:
            return float(bound)
    return None


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    if value == float("inf"):
        return "very long"
    return f"≤ {value * 1000:g} ms" if value < 1 else f"≤ {value:g} s"


def _pool(pool_id: str, pool: Mapping[str, Any]) -> RenderableType:
    bar = Text()
    for state, style in _BLOCK_STYLES.items():
        bar.append("█" * round(_BAR_CELLS * pool[state] / pool["num_blocks"]), style)
    counts = Text.assemble(
        *((f"{state} {pool[state]:,}  ", style) for state, style in _BLOCK_STYLES.items())
    )
    size = format_size(pool["num_blocks"] * pool["block_bytes"])
    hits = pool["hits"] / pool["queries"] if pool["queries"] else 0.0
    about = f"{pool['num_blocks']:,} blocks, {size}; {pool['num_holders']} holders, "
    about += f"{pool['waiters']} waiters; prefix hits {hits:.1%}"
    warnings = ["recovering"] if pool["recovering"] else []
    warnings += [f"{worker_name(each)} is fenced" for each in pool["fenced"]]
    lines: list[RenderableType] = [bar, counts, about]
    lines += [Text(warning, style="red") for warning in warnings]
    return Panel(Group(*lines), title=f"pool {pool_id}", title_align="left")


def _workers(workers: Mapping[str, Any]) -> RenderableType:
    table = Table(expand=True, box=None, header_style="bright_black")
    for name in ("WORKER", "STATE", "RUNNING", "SLOTS", "PROMPT TOKENS TO COMPUTE"):
        table.add_column(name, justify="left" if name in ("WORKER", "STATE") else "right")
    for worker_id, worker in sorted(workers.items(), key=lambda one: (one[1]["role"], one[0])):
        is_decode = worker["role"] == "decode"
        table.add_row(
            worker_name(worker_id),
            Text(worker["state"], style="green" if worker["state"] == "serving" else "red"),
            f"{worker['running']:,}",
            f"{worker['slots'] - worker['free_slots']} of {worker['slots']}" if is_decode else "",
            "" if is_decode else f"{worker['pending_tokens']:,}",
        )
    return Panel(table, title="workers", title_align="left")


def _requests(document: Document) -> RenderableType:
    """The requests that have not ended, and the last ones that have, newest first."""
    table = Table(expand=True, box=None, header_style="bright_black")
    for name in ("REQUEST", "PHASE", "FOR", "PROMPT", "CACHED", "TOKENS", "PREEMPTED", "MOVED"):
        table.add_column(name, justify="left" if name in ("REQUEST", "PHASE") else "right")
    requests = sorted(
        document["requests"].items(), key=lambda one: ("outcome" in one[1], -int(one[0]))
    )
    for _, request in requests[:_NUM_REQUESTS]:
        phase, begun_ms = request["spans"][-1][:2]
        for_s = (request.get("ended_ms", document["now_ms"]) - begun_ms) / 1000
        ended = "outcome" in request
        name = request["outcome"] if ended else phase
        style = "bright_black" if ended else _PHASE_STYLES.get(phase, "")
        numbers = (request[key] for key in ("prompt", "cached", "tokens", "preemptions", "moves"))
        table.add_row(
            Text(request["id"][:24], style=style),
            Text(name, style=style),
            "" if ended else f"{for_s:.1f} s",
            *(f"{number:,}" for number in numbers),
        )
    return Panel(table, title="requests", title_align="left")
