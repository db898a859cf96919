"""`quire top`: the dashboard of a gateway in a terminal, from the dashboard's feed."""

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from quire.cli.calls import HttpFlags, http_call
from quire.errors import Unreachable
from quire.sizes import format_size
from quire.worker_names import worker_name

if TYPE_CHECKING:
    from rich.console import RenderableType

_NUM_REQUESTS = 20
_POOL = "POOL SIZE BLOCKS HELD CACHED FREE HOLDERS WAITERS HITS TENANTS"
_WORKER = "WORKER STATE RUNNING SLOTS PENDING"
_REQUEST = "REQUEST PHASE FOR PROMPT CACHED TOKENS PREEMPTED MOVED"


@dataclass(frozen=True)
class TopFlags(HttpFlags):
    """The gateway whose dashboard is shown."""

    once: Annotated[
        bool, Option("--once", help="print the state once, and end; always so without a terminal")
    ] = False


def top(flags: TopFlags) -> None:
    """Show pools, workers and requests of a deployment, live. Ctrl-C ends it."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console()
    if flags.once or not console.is_terminal:
        console.print(render(read_document(flags)))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        shown: RenderableType = ""
        while True:
            problem = ""
            try:
                shown = render(read_document(flags))
            except Unreachable as error:
                problem = f"{error}; trying again"
            live.update(Group(Text(problem, style="red"), shown), refresh=True)
            time.sleep(1)


def read_document(flags: TopFlags) -> dict[str, Any]:
    """The first event of the feed, which has the whole state. Raises UnreachableUrl if the gateway
    does not answer, and QuireError if it refuses."""
    with http_call(flags, "/dashboard/feed") as answer:
        data = next((line[5:] for line in answer if line.startswith(b"data:")), b"")
        return dict(json.loads(data))


def render(d: dict[str, Any]) -> "RenderableType":
    """A document of the feed as figures, and as tables of pools, workers and requests."""
    from rich.console import Group
    from rich.text import Text

    quiet = "" if d["block_manager"] else "; the block manager does not answer"
    ttft, inter_token = d["ttft"], d["inter_token"]
    figures = [
        f"{', '.join(d['models']) or 'no model'}  {d['gateway']}{quiet}",
        f"{d['num_running']:,} running, {d['num_waiting']:,} waiting for a token, the oldest for "
        f"{d['oldest_wait_ms'] / 1000:.1f} s; {d['generated_tokens']:,.0f} tokens",
        f"ttft p50 {_bound(ttft, 0.5)}, p99 {_bound(ttft, 0.99)}; token p50 "
        f"{_bound(inter_token, 0.5)}, p99 {_bound(inter_token, 0.99)}; {d['preemptions']:,.0f} "
        f"preempted, {d['moves']:,.0f} moved, {sum(d['failures'].values()):,.0f} errors",
    ]
    requests = sorted(d["requests"].items(), key=lambda one: ("outcome" in one[1], -int(one[0])))
    for pool_id, pool in d["pools"].items():
        figures += [f"pool {pool_id} is recovering"] * pool["recovering"]
        figures += [f"{worker_name(each)} is fenced" for each in pool["fenced"]]
    pools, workers = sorted(d["pools"].items()), sorted(d["workers"].items())
    return Group(
        *map(Text, figures),
        _table(_POOL, (_pool(*one) for one in pools)),
        _table(_WORKER, (_worker(*one) for one in workers)),
        _table(_REQUEST, (_request(one, d["now_ms"]) for _, one in requests[:_NUM_REQUESTS])),
    )


def _table(names: str, rows: Iterable[Iterable[str]]) -> "RenderableType":
    from rich.table import Table
    from rich.text import Text

    table = Table(expand=True, box=None, header_style="bright_black")
    for index, name in enumerate(names.split()):
        table.add_column(name, justify="left" if index < 2 else "right")
    for row in rows:
        table.add_row(*map(Text, row))  # not as markup: clients choose ids
    return table


def _pool(pool_id: str, pool: Mapping[str, Any]) -> list[str]:
    size = format_size(pool["num_blocks"] * pool["block_bytes"])
    hits = pool["hits"] / pool["queries"] if pool["queries"] else 0.0
    keys = ("num_blocks", "held", "cached", "free", "num_holders", "waiters")
    used = ((tenant, blocks / pool["num_blocks"]) for tenant, blocks in pool["shares"].items())
    tenants = ", ".join(f"{tenant} {share:.0%}" for tenant, share in [*used][:3]) or "-"
    return [pool_id, size, *(f"{pool[key]:,}" for key in keys), f"{hits:.1%}", tenants]


def _worker(worker_id: str, worker: Mapping[str, Any]) -> list[str]:
    slots = f"{worker['slots'] - worker['free_slots']} of {worker['slots']}"
    numbers = str(worker["running"]), slots, f"{worker['pending_tokens']:,}"
    return [worker_name(worker_id), worker["state"], *numbers]


def _request(request: Mapping[str, Any], now_ms: int) -> list[str]:
    phase, begun_ms = request["spans"][-1][:2]
    for_s = (request.get("ended_ms", now_ms) - begun_ms) / 1000
    numbers = (request[key] for key in ("prompt", "cached", "tokens", "preemptions", "moves"))
    return [request["id"][:24], request.get("outcome", phase), f"{for_s:.1f} s", *map(str, numbers)]


def _bound(histogram: Mapping[str, Any], share: float) -> str:
    """The upper bound of the bucket in which this share of the values ends."""
    sums = [*accumulate(histogram["counts"])]
    if not sums[-1]:
        return "-"
    bucket = next(i for i, number in enumerate(sums) if number >= share * sums[-1])
    bound = [*histogram["bounds"], inf][bucket]
    return f"{bound * 1000:g} ms" if bound < 1 else f"{bound:g} s"
