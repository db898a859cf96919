"""The dashboard's part of the HTTP application: the page's files, its feed, and its questions."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NoReturn

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.gateway.access.caller import LOCAL_OPERATOR, bind_caller, require_operator
from services.gateway.access.keyring import Keyring
from services.gateway.access.local_only import DashboardSetting, check_local
from services.gateway.dashboard.block_maps import BlockMaps
from services.gateway.dashboard.document import DashboardDocument
from services.gateway.dashboard.feed import Feed
from services.gateway.grpc.relay import Relay
from services.gateway.http.answering.sending import EventStream, Json
from services.gateway.http.middleware.authentication import PAGE
from services.gateway.wiring import Wiring
from services.runtime.errors import InvalidApiKey, InvalidRequest, PermissionDenied
from services.runtime.metrics import GatewayMetrics

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_FROM_PAGE_HEADER = "X-Quire-Dashboard"
"""A page of another site needs a CORS permission to send this header, and Quire gives none."""


class Dashboard:
    """The dashboard of a gateway that listens on the address `host`. `keyring` is None if API keys
    are off; with API keys, the dashboard needs the key of an operator."""

    def __init__(
        self,
        setting: DashboardSetting,
        wiring: Wiring,
        metrics: GatewayMetrics,
        block_manager: Relay,
        *,
        host: str,
        keyring: Keyring | None,
    ) -> None:
        self._setting, self._host, self._keyring = setting, host, keyring
        self._explainer = wiring.explainer
        self._block_maps = BlockMaps(block_manager, wiring.dispatcher)
        self.document = DashboardDocument(wiring, metrics, self._block_maps)
        self.feed = Feed(self.document.build)
        self._files = {
            path.name: Response(path.read_bytes(), 200, _HEADERS, _TYPES[path.suffix])
            for path in PAGE.iterdir()
        }

    def routes(self) -> list[Route]:
        """None if the dashboard is off."""
        if self._setting == "off":
            return []
        return [
            Route("/", self._page),
            Route("/dashboard/feed", self._events),
            Route("/dashboard/blocks", self._blocks),
            Route("/dashboard/explain", self._explain),
            Route("/dashboard/audit", self._audit, methods=["POST"]),
            Route("/dashboard/{name}", self._file),
        ]

    def _check(self, request: Request) -> None:
        """Raise an error if a request may not see the dashboard's data."""
        if self._keyring is not None:
            bind_caller(self._keyring.account(request.headers.get("authorization")).caller)
            require_operator()
        elif self._setting == "auto":
            check_local(request, self._host)

    async def _page(self, _request: Request) -> Response:
        return self._files["index.html"]

    async def _file(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._files:
            raise HTTPException(404)
        return self._files[name]

    async def _events(self, request: Request) -> Response:
        self._check(request)
        return EventStream(self._checked_events(request), _cut_off, ping_s=0, is_named=True)

    async def _checked_events(self, request: Request) -> AsyncGenerator[bytes, None]:
        """Yield the feed's events until the request's key is revoked or loses the role operator."""
        async with aclosing(self.feed.events()) as events:
            async for event in events:
                try:
                    self._check(request)
                except (InvalidApiKey, PermissionDenied):
                    return
                yield event

    async def _blocks(self, request: Request) -> Response:
        self._check(request)
        pool_id, cell = request.query_params.get("pool", ""), request.query_params.get("cell", "")
        if not pool_id or not cell.isdecimal() or len(cell) > 6:
            raise InvalidRequest("name a pool and the number of a cell: ?pool=ID&cell=0")
        return Json(await self._block_maps.describe(pool_id, int(cell)))

    async def _explain(self, request: Request) -> Response:
        self._check(request)
        name = request.query_params.get("id", "")
        return Json(self._explainer.explain(name, LOCAL_OPERATOR))

    async def _audit(self, request: Request) -> Response:
        self._check(request)
        if _FROM_PAGE_HEADER not in request.headers:
            raise InvalidRequest(f"send the header {_FROM_PAGE_HEADER}: 1")
        await self._block_maps.audit()
        return Json({})


def _cut_off(error: Exception) -> NoReturn:
    """End the feed's connection: the page connects again."""
    raise error
