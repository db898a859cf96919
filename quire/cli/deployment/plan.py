"""`quire plan`: how many prefill and decode workers the measured load needs."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from typer import BadParameter, Option

from quire.cli.deployment.scale import print_change
from quire.cli.flags import Json, OperationsFlags
from quire.cli.output import Columns, print_items
from quire.errors import QuireError
from quire.planning import INTER_TOKEN_S, TTFT_S, Plan, Targets, held_share, mean
from quire.planning import plan as plan_of

if TYPE_CHECKING:
    from quire.client import Client

_SAMPLE_S = 1.0


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
    targets = Targets(ttft, inter_token)
    with gateway.connect() as client:
        plans = _measure(client, targets, window)
        rows = [row for model, found in plans.items() for row in _rows(model, found, total)]
        if not rows:
            raise QuireError("no model is served now, so there is no load to plan for", "no_model")
        print_items(as_json, COLUMNS, rows)
        if apply:
            _apply(client, rows, quiet=as_json)


def _measure(client: "Client", targets: Targets, window_s: float) -> dict[str, Plan]:
    """Plan each model again and again, and return the means of those that are served at the
    end."""
    until, samples = time.monotonic() + window_s, [_sample(client, targets)]
    while time.monotonic() < until:
        time.sleep(min(_SAMPLE_S, window_s))
        samples.append(_sample(client, targets))
    return {
        model: mean([sample[model] for sample in samples if model in sample])
        for model in samples[-1]
    }


def _sample(client: "Client", targets: Targets) -> dict[str, Plan]:
    serving = (each for each in client.workers() if each.state == "serving")
    workers = [each for each in serving if each.role in ("prefill", "decode")]
    pools = client.pools()
    return {
        model: plan_of(
            [each for each in workers if (each.model, each.role) == (model, "prefill")],
            [each for each in workers if (each.model, each.role) == (model, "decode")],
            targets,
            held_share=held_share(
                (pool.num_held, pool.num_blocks) for pool in pools if pool.model == model
            ),
        )
        for model in sorted({each.model for each in workers})
    }


def _rows(model: str, found: Plan, total: int | None) -> list[Planned]:
    """Return the rows of the table. Without `total` there are as many workers as the load needs."""
    roles = {"prefill": found.prefill, "decode": found.decode}
    numbers = [each.recommended for each in roles.values()]
    if total is not None:
        numbers = list(found.divided(total))
    return [
        Planned(model, role, each.num_workers, round(each.needed, 2), number, each.reason)
        for (role, each), number in zip(roles.items(), numbers, strict=True)
    ]


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
            num_prefill=wanted[model, "prefill"], num_decode=wanted[model, "decode"], model=model
        )
        if not quiet:
            print_change(scaled)
