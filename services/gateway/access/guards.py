"""Authenticates gRPC calls, for the public listener and for the listener of operations."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

from grpc import aio

from quire.sockets import join_host_port
from services.gateway.access.caller import (
    EVERYONE,
    LOCAL_OPERATOR,
    Caller,
    bind_caller,
    require_operator,
)
from services.gateway.access.client_address import Address, client_address
from services.gateway.access.keyring import Keyring
from services.runtime.errors import InvalidApiKey, PermissionDenied
from services.runtime.rpc.refusal_log import RefusalLog

REFUSED_EVENT, DENIED_EVENT = "login_refused", "operation_refused"


class KeyGuard:
    """Binds the caller of each call. `keyring` is None if API keys are off. `operations` are the
    services with methods that need an operator's key; a client at a Unix socket, which only the
    run's user may open, needs no key."""

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
                    _peer(context), operator=caller.key, method=method, reason=reason
                )
                raise

    def _caller(self, method: str, context: aio.ServicerContext[Any, Any]) -> Caller:
        if context.peer().startswith("unix:"):
            return LOCAL_OPERATOR
        if self._keyring is None:
            # Without keys the public port has no operations; OPERATIONS_PORT has them for
            # everybody who reaches it.
            return replace(EVERYONE, host=_client(context)[0], is_operator=bool(self._operations))
        try:
            authorization = next(iter(_metadata(context, "authorization")), None)
            return self._keyring.account(authorization).caller
        except InvalidApiKey as error:
            self._refusals.note(_peer(context), method=method, reason=str(error))
            raise


def _client(context: aio.ServicerContext[Any, Any]) -> Address:
    """gRPC names a peer `ipv4:192.0.2.7:4000` or `ipv6:%5B2001:db8::7%5D:4000`."""
    host, _, port = unquote(context.peer()).partition(":")[2].rpartition(":")
    return client_address((host.strip("[]"), int(port)), _metadata(context, "x-forwarded-for"))


def _peer(context: aio.ServicerContext[Any, Any]) -> str:
    return join_host_port(*_client(context))


def _metadata(context: aio.ServicerContext[Any, Any], name: str) -> list[str]:
    found = context.invocation_metadata() or ()
    return [value for key, value in found if key == name and isinstance(value, str)]
