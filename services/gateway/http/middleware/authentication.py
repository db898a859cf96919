"""Authenticates HTTP requests: the one place that decides which paths need a key.

Every path needs one, also a path that does not exist, except the paths in OPEN_PATHS.
"""

from dataclasses import replace
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.sockets import join_host_port
from services.gateway.access.caller import EVERYONE, bind_caller, current_caller, require_operator
from services.gateway.access.client_address import Address, client_address
from services.gateway.access.guards import DENIED_EVENT, REFUSED_EVENT
from services.gateway.access.keyring import Keyring
from services.runtime.errors import InvalidApiKey, PermissionDenied
from services.runtime.rpc.refusal_log import RefusalLog

PAGE = Path(__file__).parents[2] / "dashboard" / "page"
"""The files of the dashboard's page."""
OPEN_PATHS = frozenset({"/health", "/", *(f"/dashboard/{file.name}" for file in PAGE.iterdir())})
"""Paths that everybody may get: they tell nothing about the deployment's users. The dashboard's
page asks for a key and sends it with its questions."""
OPERATOR_PATHS = frozenset({"/metrics"})
"""Paths that need an operator's key where keys are on: they tell about all users."""
OPERATION_PATHS = frozenset(
    {"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/dashboard/audit"}
)
"""Paths that need an operator's key always. Behind a proxy on this host, everybody seems to be a
user of this host."""
_MAX_PATH_CHARS = 200


class Authentication:
    """Middleware: binds the caller of each request. `keyring` is None if API keys are off."""

    def __init__(self, app: ASGIApp, keyring: Keyring | None) -> None:
        self._app = app
        self._keyring = keyring
        self._refusals = RefusalLog(REFUSED_EVENT)
        self._denials = RefusalLog(DENIED_EVENT)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._authenticate(scope)
            await self._app(scope, receive, send)
        except PermissionDenied as error:
            operator, reason = current_caller(EVERYONE).key, str(error)
            self._denials.note(_peer(scope), operator=operator, method=_path(scope), reason=reason)
            raise

    def _authenticate(self, scope: Scope) -> None:
        """Raises InvalidApiKey, PermissionDenied."""
        keyring = self._keyring
        if keyring is None:
            bind_caller(replace(EVERYONE, host=_client(scope)[0]))
        elif scope["path"] not in OPEN_PATHS:
            try:
                headers = Headers(scope=scope)
                key = headers.get("x-api-key")  # of Anthropic's clients
                account = keyring.account(headers.get("authorization", key and f"Bearer {key}"))
            except InvalidApiKey as error:
                self._refusals.note(_peer(scope), method=_path(scope), reason=str(error))
                raise
            bind_caller(account.caller)
            if scope["path"] in OPERATOR_PATHS:
                require_operator()
        if scope["path"] in OPERATION_PATHS:
            require_operator()


def _client(scope: Scope) -> Address:
    forwarded = Headers(scope=scope).getlist("x-forwarded-for")
    return client_address(scope.get("client") or ("", 0), forwarded)


def _peer(scope: Scope) -> str:
    return join_host_port(*_client(scope))


def _path(scope: Scope) -> str:
    """The path for a log line: a client may send one of 64 KiB."""
    return str(scope["path"][:_MAX_PATH_CHARS])
