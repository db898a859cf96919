"""`quire drain`: empties a worker."""

import json
from collections.abc import Sequence
from typing import Annotated

from typer import Argument, Option

from quire.cli.flags import Json, OperationsFlags, WaitFlags
from quire.errors import NotFound
from quire.reports import Worker


def drain(
    worker: Annotated[
        str, Argument(metavar="WORKER", help="its name, id or HOST:PORT (`quire workers`)")
    ],
    gateway: OperationsFlags,
    until: WaitFlags,
    force: Annotated[
        bool, Option("--force", help="drain it even if it is the last of its role on a pool")
    ] = False,
    as_json: Json = False,
) -> None:
    """Move a worker's requests to others, then let it exit."""
    with gateway.connect() as client:
        found = find_worker(client.workers(), worker)
        num_running = client.drain(found.worker_id, force=force)

        def has_left() -> bool:
            return all(one.worker_id != found.worker_id for one in client.workers())

        if not as_json:
            print(f"{found.name} takes no new work; it still runs {num_running} requests")
        if until.wait:
            until.until_done(lambda: "" if has_left() else f"{found.name} is still there")
            if not as_json:
                print(f"{found.name} has left")
    if as_json:
        print(json.dumps({"num_running": num_running, "left": until.wait}))


def find_worker(workers: Sequence[Worker], text: str) -> Worker:
    """Return the worker with this name, id or address. Raises NotFound if there is none, or if
    several have the name, on several hosts or because one with the name has just started again."""
    found = [one for one in workers if text in (one.worker_id, one.name, one.address)]
    if len(serving := [one for one in found if one.state == "serving"]) == 1:
        found = serving
    if len(found) == 1:
        return found[0]
    if not found:
        there = ", ".join(one.name for one in workers) or "none"
        raise NotFound(f"there is no worker {text!r}; the workers: {there}", "unknown_worker")
    several = ", ".join(f"{one.worker_id} at {one.address or 'no address'}" for one in found)
    raise NotFound(f"several workers have the name {text}: {several}", "unknown_worker")
