"""Decides which callers may see the dashboard.

Without API keys, the dashboard is for users of this host: connections from the loopback interface
that name this host and that no proxy has forwarded. `on` shows it to everybody who reaches the
port.
"""

import re
from typing import Literal

from starlette.exceptions import HTTPException
from starlette.requests import Request

from services.gateway.access.client_address import is_loopback

DashboardSetting = Literal["auto", "on", "off"]

_PORT = re.compile(r":\d*$", re.ASCII)
_FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")


def check_local(request: Request) -> None:
    """Raise a 403 unless the request comes from this host.

    The Host header must name this host, too: the page of another site may make its own name resolve
    to 127.0.0.1 (DNS rebinding), and the browser would then let it read the feed.
    """
    host = request.client.host if request.client else ""
    named = _PORT.sub("", request.headers.get("host", "")).lower()
    names_this_host = named == "localhost" or is_loopback(named.strip("[]"))
    is_forwarded = any(name in request.headers for name in _FORWARDED)
    if not is_loopback(host) or not names_this_host or is_forwarded:
        raise HTTPException(
            403,
            "without API keys, the dashboard is only for this host: open it at "
            "http://127.0.0.1:PORT/ there, or through `ssh -L`. With QUIRE_GATEWAY_DASHBOARD=on, "
            "everybody who reaches this port sees it",
        )
