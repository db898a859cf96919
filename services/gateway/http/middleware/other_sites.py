"""Refuses requests that a page of another site makes its user's browser send."""

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from services.runtime.errors import PermissionDenied

_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_OTHER_SITES = ("cross-site", "same-site")
"""Values of Sec-Fetch-Site; `same-site` is another port or subdomain."""
_MAX_SHOWN = 200


class OtherSites:
    """Middleware: raises PermissionDenied for a request that computes or changes something, unless
    `cors_origins` has the page's origin.

    CORS keeps such a page from reading the answer, but not from sending a form whose bytes are
    JSON. Browsers say where a request comes from if the server has TLS or is on their own host; no
    page can change that header.
    """

    def __init__(self, app: ASGIApp, cors_origins: Sequence[str]) -> None:
        self._app = app
        self._cors_origins = frozenset(cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if scope["method"] not in _SAFE_METHODS and headers.get("sec-fetch-site") in _OTHER_SITES:
            origin = headers.get("origin", "null")
            if self._cors_origins.isdisjoint((origin, "*")):
                raise PermissionDenied(
                    f"pages of {origin[:_MAX_SHOWN]} may not use this server; "
                    "CORS_ORIGINS may allow them"
                )
        await self._app(scope, receive, send)
