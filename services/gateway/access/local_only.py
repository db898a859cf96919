"""Decides which callers may see the dashboard.

Without API keys, the dashboard is for users of this host: the gateway listens on a loopback address
only, and the request names this host and has passed no proxy. `on` shows it to everybody who
reaches the port.
"""

import re
from typing import Literal

from starlette.exceptions import HTTPException
from starlette.requests import Request

from services.gateway.access.client_address import is_loopback

DashboardSetting = Literal["auto", "on", "off"]

_PORT = re.compile(r":\d*$", re.ASCII)
_FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")


def check_local(request: Request, listens_at: str) -> None:
    """Raise a 403 unless the request comes from this host. `listens_at` is the gateway's address.

    The Host header must name this host, too: the page of another site may make its own name resolve
    to 127.0.0.1 (DNS rebinding), and the browser would then let it read the feed. A proxy on this
    host adds a header, or speaks HTTP/1.0, as nginx does if it is told nothing else.
    """
    is_forwarded = any(name in request.headers for name in _FORWARDED)
    is_direct = not is_forwarded and request.scope["http_version"] != "1.0"
    named = _PORT.sub("", request.headers.get("host", "")).strip("[]")
    if not (is_direct and _is_this_host(listens_at) and _is_this_host(named)):
        raise HTTPException(
            403,
            "without API keys, the dashboard is only for this host: let the gateway listen on "
            "127.0.0.1, and open http://127.0.0.1:PORT/ there, or through `ssh -L`. With "
            "QUIRE_GATEWAY_DASHBOARD=on, everybody who reaches this port sees it",
        )


def _is_this_host(name: str) -> bool:
    return name.lower() == "localhost" or is_loopback(name)
