"""`quire drain`: empties a worker."""

import json
import time
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from quire.cli.flags import Json, OperationsFlags, WaitFlags
from quire.errors import DeadlineExceeded

if TYPE_CHECKING:
    from quire.client import Client

POLL_S = 0.2


def drain(
    worker: Annotated[
        str, Argument(metavar="WORKER", help="its id or its HOST:PORT (`quire workers`)")
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
        worker = _worker_id(client, worker)
        num_running = client.drain(worker, force=force)
        if not as_json:
            print(f"{worker} takes no new work; it still runs {num_running} requests")
        if until.wait:
            _wait_until_left(client, worker, until.timeout)
            if not as_json:
                print(f"{worker} has left")
    if as_json:
        print(json.dumps({"num_running": num_running, "left": until.wait}))


def _worker_id(client: "Client", worker: str) -> str:
    """The id of the worker at this address; no worker has it: the argument, as the id."""
    if ":" not in worker:
        return worker
    found = [each.worker_id for each in client.workers() if each.address == worker]
    return found[0] if found else worker


def _wait_until_left(client: "Client", worker_id: str, timeout_s: float) -> None:
    give_up_at = time.monotonic() + timeout_s
    while any(worker.worker_id == worker_id for worker in client.workers()):
        if time.monotonic() > give_up_at:
            raise DeadlineExceeded(f"{worker_id} is still there after {timeout_s:g} s", "timeout")
        time.sleep(POLL_S)
