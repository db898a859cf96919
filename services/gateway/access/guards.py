"""Authenticates gRPC calls, for the public listener and for that of operations."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from grpc import aio

from services.common.errors import InvalidApiKey, PermissionDenied
from services.common.rpc.refusal_log import RefusalLog
from services.gateway.access.caller import (
    EVERYONE,
    LOCAL_OPERATOR,
    Caller,
    bind_caller,
    require_operator,
)
from services.gateway.access.keyring import Keyring

REFUSED_EVENT, DENIED_EVENT = "login_refused", "operation_refused"
_LOOPBACK = ("ipv4:127.0.0.1", "ipv6:%5B::1%5D")


class KeyGuard:
    """Binds the caller of each call. `keyring`: None if API keys are off. `operations`: the
    services whose methods need an operator's key; a client at a Unix socket, which only the run's
    user may open, needs no key."""

    def __init__(self, keyring: Keyring | None, operations: Sequence[str] = ()) -> None:
        self._keyring = keyring
        self._operations = tuple(f"/{service}/" for service in operations)
        self._refusals = RefusalLog(REFUSED_EVENT)
        self._denials = RefusalLog(DENIED_EVENT)

    async def admit(self, method: str, context: aio.ServicerContext[Any, Any]) -> None:
        """Raises InvalidApiKey, PermissionDenied."""
        caller = self._caller(method, context)
        bind_caller(caller)
        if method.startswith(self._operations):
            try:
                require_operator()
            except PermissionDenied as error:
                reason = str(error)
                self._denials.note(
                    context.peer(), operator=caller.key, method=method, reason=reason
                )
                raise

    def _caller(self, method: str, context: aio.ServicerContext[Any, Any]) -> Caller:
        if context.peer().startswith("unix:"):
            return LOCAL_OPERATOR
        if self._keyring is None:
            return replace(EVERYONE, host=_host(context))
        try:
            return self._keyring.account(_metadata(context, "authorization")).caller
        except InvalidApiKey as error:
            self._refusals.note(context.peer(), method=method, reason=str(error))
            raise


def _host(context: aio.ServicerContext[Any, Any]) -> str:
    """The client's address; behind a proxy on this host, the address that the proxy names."""
    host = context.peer().rpartition(":")[0]
    if host not in _LOOPBACK:
        return host
    forwarded = _metadata(context, "x-forwarded-for") or ""
    return forwarded.rpartition(",")[2].strip() or host


def _metadata(context: aio.ServicerContext[Any, Any], name: str) -> str | None:
    for key, value in context.invocation_metadata() or ():
        if key == name and isinstance(value, str):
            return value
    return None
