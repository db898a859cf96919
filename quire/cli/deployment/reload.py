"""`quire reload`: serves new weights in the processes that run."""

import json
from typing import Annotated

from typer import Option

from quire.cli.flags import Json, OperationsFlags
from quire.worker_names import worker_name


def reload(
    gateway: OperationsFlags,
    model: Annotated[
        str, Option(metavar="NAME", help="whose weights; needed if there are several models")
    ] = "",
    as_json: Json = False,
) -> None:
    """Serve the weights that are at the model's path now, such as the new target of a link.

    The workers read them while they serve. Then all of them change at once, and requests go on
    with the new weights from the tokens that they have. The architecture must be the same.
    """
    with gateway.connect() as client:
        worker_ids = client.reload(model)
    if as_json:
        print(json.dumps({"worker_ids": worker_ids}))
    elif worker_ids:
        print(f"the new weights are served by {', '.join(map(worker_name, worker_ids))}")
    else:
        print("these weights are served already")
