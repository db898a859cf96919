"""Authenticates HTTP requests: the one place that decides which paths need a key.

Every path needs one, also a path that does not exist, except those of OPEN_PATHS.
"""

from dataclasses import replace

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from services.common.errors import InvalidApiKey
from services.common.rpc.refusal_log import RefusalLog
from services.gateway.access.caller import EVERYONE, bind_caller, require_operator
from services.gateway.access.guards import REFUSED_EVENT
from services.gateway.access.keyring import Keyring
from services.gateway.dashboard.routes import PAGE

OPEN_PATHS = frozenset({"/health", "/", *(f"/dashboard/{file.name}" for file in PAGE.iterdir())})
"""Paths that everybody may get: they tell nothing about the deployment's users. The dashboard's
page asks for a key and sends it with its questions."""
OPERATOR_PATHS = frozenset({"/metrics"})
"""Paths that need an operator's key: they tell about all users."""


class Authentication:
    """Middleware: binds the caller of each request. `keyring`: None if API keys are off."""

    def __init__(self, app: ASGIApp, keyring: Keyring | None) -> None:
        self._app = app
        self._keyring = keyring
        self._refusals = RefusalLog(REFUSED_EVENT)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._authenticate(scope)
        await self._app(scope, receive, send)

    def _authenticate(self, scope: Scope) -> None:
        """Raises InvalidApiKey, PermissionDenied."""
        keyring = self._keyring
        if keyring is None:
            bind_caller(replace(EVERYONE, host=_peer(scope)[0]))
        elif scope["path"] not in OPEN_PATHS:
            try:
                account = keyring.account(Headers(scope=scope).get("authorization"))
            except InvalidApiKey as error:
                host, port = _peer(scope)
                self._refusals.note(f"{host}:{port}", method=scope["path"], reason=str(error))
                raise
            bind_caller(account.caller)
            if scope["path"] in OPERATOR_PATHS:
                require_operator()


def _peer(scope: Scope) -> tuple[str, int]:
    return scope.get("client") or ("", 0)
