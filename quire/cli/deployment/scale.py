"""`quire scale`: starts workers of a `quire serve`, or drains some."""

import sys
from typing import TYPE_CHECKING, Annotated

from typer import Argument, BadParameter, Option

from quire.cli.flags import Json, OperationsFlags, WaitFlags
from quire.cli.output import print_json
from quire.errors import Unavailable
from quire.reports import Scaled
from quire.worker_names import role_of

if TYPE_CHECKING:
    from quire.client import Client


def scale(
    numbers: Annotated[list[str], Argument(metavar="ROLE=N...", help="decode=3, prefill=2")],
    gateway: OperationsFlags,
    until: WaitFlags,
    model: Annotated[
        str, Option(metavar="NAME", help="whose workers; needed if the run has several models")
    ] = "",
    as_json: Json = False,
) -> None:
    """Let workers of a `quire serve` take the other role, start or drain some."""
    wanted = dict(map(_number_of_workers, numbers))
    with gateway.connect() as client:
        scaled = client.scale(
            num_prefill=wanted.get("prefill"), num_decode=wanted.get("decode"), model=model
        )
        if scaled.warning:
            print(f"quire: warning: {scaled.warning}", file=sys.stderr)
        if not as_json:
            print_change(scaled)
        if until.wait:
            until.until_done(lambda: _missing(client, wanted, model))
        if as_json:
            print_json([scaled])
        elif until.wait or not (scaled.starting or scaled.leaving or scaled.changing):
            print(f"{scaled.num_prefill} prefill and {scaled.num_decode} decode workers")


def print_change(scaled: Scaled) -> None:
    for verb, names in (("start", scaled.starting), ("leave", scaled.leaving)):
        if names:
            print(f"to {verb}: {', '.join(names)}")
    for name, role in scaled.changing.items():
        print(f"to become a {role} worker: {name}")


def _number_of_workers(text: str) -> tuple[str, int]:
    role, _, number = text.partition("=")
    if role not in ("prefill", "decode") or not number.isdecimal():
        raise BadParameter(f"{text!r} is neither decode=N nor prefill=N")
    return role, int(number)


def _missing(client: "Client", wanted: dict[str, int], model: str) -> str:
    """The numbers of workers that are there, unless exactly the wanted ones are registered and all
    of them serve. Raises Unavailable if a worker fails to start again and again."""
    workers = [
        worker
        for worker in client.workers()
        if worker.role in wanted and model in ("", worker.model)
    ]
    numbers = {role: sum(worker.role == role for worker in workers) for role in wanted}
    if numbers == wanted and all(worker.state == "serving" for worker in workers):
        return ""
    for name, reason in client.scale(model=model).failing.items():
        if role_of(name) in wanted:
            text = f"{name} does not start: {reason} (it is started again and again)"
            raise Unavailable(text, "worker_does_not_start")
    return f"there are {numbers}"
