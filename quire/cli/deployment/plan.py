"""`quire plan`: how many prefill and decode workers the measured load needs."""

import time
from collections import defaultdict
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

from typer import BadParameter, Option

from quire.cli.deployment.scale import print_change
from quire.cli.flags import Json, OperationsFlags
from quire.cli.output import Columns, print_items
from quire.errors import QuireError
from quire.planning import INTER_TOKEN_S, TTFT_S, divided, held_share, plan_decode, plan_prefill
from quire.reports import Pool, Worker

if TYPE_CHECKING:
    from quire.client import Client

_SAMPLE_S = 1.0
_FIGURES = (
    *("num_running", "num_free_slots", "num_pending_tokens"),
    *("busy_permille", "step_us", "tokens_per_s"),
)


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan for one role of a model; see `quire.planning.RolePlan`."""

    model: str
    role: str
    num_workers: int
    needed: float
    recommended: int
    reason: str


COLUMNS: Columns[Planned] = {
    "MODEL": lambda row: row.model,
    "ROLE": lambda row: row.role,
    "WORKERS": lambda row: row.num_workers,
    "NEEDED": lambda row: f"{row.needed:.2f}",
    "RECOMMENDED": lambda row: row.recommended,
    "BECAUSE": lambda row: row.reason,
}


def plan(
    gateway: OperationsFlags,
    window: Annotated[float, Option(metavar="S", min=0, help="how long to measure")] = 10.0,
    ttft: Annotated[
        float, Option(metavar="S", min=0.001, help="target for the time to first token")
    ] = TTFT_S,
    inter_token: Annotated[
        float, Option(metavar="S", min=0.001, help="target for the inter-token latency")
    ] = INTER_TOKEN_S,
    total: Annotated[
        int | None,
        Option("--total", metavar="N", min=2, help="divide N workers; default: as many as needed"),
    ] = None,
    apply: Annotated[
        bool, Option("--apply", help="start and drain workers of the `quire serve` accordingly")
    ] = False,
    as_json: Json = False,
) -> None:
    """Recommend a number of prefill and of decode workers for the measured load."""
    with gateway.connect() as client:
        workers, pools = _measure(client, window)
        rows = []
        for model in sorted({worker.model for worker in workers}):
            of_model = [worker for worker in workers if worker.model == model]
            held = held_share((p.num_held, p.num_blocks) for p in pools if p.model == model)
            prefill = plan_prefill([each for each in of_model if each.role == "prefill"], ttft)
            decoders = [each for each in of_model if each.role == "decode"]
            decode = plan_decode(decoders, inter_token, held_share=held)
            numbers = prefill.recommended, decode.recommended
            mixes = not prefill.num_workers and any(each.engine.get("mix") for each in decoders)
            if total is not None:
                numbers = (0, total) if mixes else divided(prefill, decode, total)
            rows += [
                Planned(model, role, one.num_workers, round(one.needed, 2), number, one.reason)
                for role, one, number in zip(
                    ("prefill", "decode"), (prefill, decode), numbers, strict=True
                )
                if not (mixes and role == "prefill")  # the decode workers prefill, too
            ]
        if not rows:
            raise QuireError("no model is served now, so there is no load to plan for", "no_model")
        print_items(as_json, COLUMNS, rows)
        if apply:
            _apply(client, rows, quiet=as_json)


def _measure(client: "Client", window_s: float) -> tuple[list[Worker], tuple[Pool, ...]]:
    """The workers that serve at the end of the window, with their mean figures over the window, and
    the pools then."""
    seen: dict[str, list[Worker]] = defaultdict(list)
    until = time.monotonic() + window_s
    while True:
        workers = [
            worker
            for worker in client.workers()
            if worker.state == "serving" and worker.role in ("prefill", "decode")
        ]
        for worker in workers:
            seen[worker.worker_id].append(worker)
        if time.monotonic() >= until:
            return [_mean(seen[worker.worker_id]) for worker in workers], client.pools()
        time.sleep(min(_SAMPLE_S, window_s))


def _mean(samples: list[Worker]) -> Worker:
    means = {name: fmean(getattr(one, name) for one in samples) for name in _FIGURES}
    return replace(samples[-1], **means)  # type: ignore[arg-type]


def _apply(client: "Client", rows: list[Planned], *, quiet: bool) -> None:
    hosts: dict[str, set[str]] = {}
    for worker in client.workers():
        if worker.role != "mover":
            hosts.setdefault(worker.model, set()).add(worker.pool_id)
    for model, pools in hosts.items():
        if len(pools) > 1:
            raise BadParameter(
                f"{model} has workers on {len(pools)} hosts, and --apply scales one host: divide "
                "them yourself, with `quire scale` on each"
            )
    wanted = {(row.model, row.role): row.recommended for row in rows}
    for model in dict.fromkeys(row.model for row in rows):
        scaled = client.scale(
            num_prefill=wanted.get((model, "prefill")),
            num_decode=wanted[model, "decode"],
            model=model,
        )
        if not quiet:
            print_change(scaled)
