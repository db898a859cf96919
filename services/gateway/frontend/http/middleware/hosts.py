"""Refuses requests whose Host header does not name this server."""

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from services.common.errors import InvalidRequest


class AllowedHosts:
    """Middleware: raises InvalidRequest unless the Host header names one of `hosts`, with any port.

    `*.example.com` stands for all hosts below example.com. Without `hosts` nothing is checked.

    This protects against DNS rebinding, where a web page's own host name resolves to this server's
    address: such a page's requests carry the page's host name.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self._app = app
        self._hosts = frozenset(host.lower() for host in hosts if not host.startswith("*."))
        self._suffixes = tuple(host[1:].lower() for host in hosts if host.startswith("*."))
        self._allows_all = not hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._allows_all:
            host = without_port(Headers(scope=scope).get("host", "")).lower()
            if host not in self._hosts and not host.endswith(self._suffixes):
                raise InvalidRequest(f"host {host!r} is not one of the allowed hosts")
        await self._app(scope, receive, send)


def without_port(host: str) -> str:
    # An IPv6 address has brackets, with and without a port.
    name, colon, port = host.rpartition(":")
    return name if colon and (port.isdecimal() or not port) else host
