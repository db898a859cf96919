"""`quire health`: whether a service is ready."""

import json

from quire.cli.flags import GatewayFlags, Json


def health(gateway: GatewayFlags, as_json: Json = False) -> int:
    """Check whether the service at the address serves: exit status 0 if it does.

    Every service of Quire answers, workers included.
    """
    with gateway.connect() as client:
        is_ready = client.is_ready()
    if as_json:
        print(json.dumps({"ready": is_ready}))
    else:
        print("ready" if is_ready else "not ready")
    return 0 if is_ready else 1
