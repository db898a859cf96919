"""`quire role`: lets a worker take the other role."""

import json
from typing import Annotated

from typer import Argument, BadParameter

from quire.cli.deployment.drain import find_worker
from quire.cli.flags import Json, OperationsFlags, WaitFlags
from quire.errors import Unavailable


def role(
    worker: Annotated[
        str, Argument(metavar="WORKER", help="its name, id or HOST:PORT (`quire workers`)")
    ],
    role: Annotated[str, Argument(metavar="prefill|decode", help="the role that it takes")],
    gateway: OperationsFlags,
    until: WaitFlags,
    as_json: Json = False,
) -> None:
    """Move a worker's requests to others, then let it serve in the other role."""
    if role not in ("prefill", "decode"):
        raise BadParameter(f"{role!r} is neither prefill nor decode")
    with gateway.connect() as client:
        found = find_worker(client.workers(), worker)
        num_running = client.change_role(found.worker_id, role)
        if not as_json:
            print(f"{found.name} becomes a {role} worker; it still runs {num_running} requests")

        def missing() -> str:
            here = [one for one in client.workers() if one.worker_id == found.worker_id]
            if not here:
                raise Unavailable(f"{found.name} has ended; it starts again as it was", "no_worker")
            serves = (here[0].role, here[0].state) == (role, "serving")
            return "" if serves else f"{found.name} is not a {role} worker"

        if until.wait:
            until.until_done(missing)
    if as_json:
        print(json.dumps({"num_running": num_running, "serves": until.wait}))
    elif until.wait:
        print(f"{found.name} serves as a {role} worker")
