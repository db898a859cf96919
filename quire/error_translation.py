"""Translates gRPC's errors to the errors of the client library.

It is apart from `quire.errors` because commands that call no server need not import gRPC.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from quire.errors import (
    STOPPING,
    BadTls,
    Conflict,
    DeadlineExceeded,
    InvalidRequest,
    NotAllowed,
    NotFound,
    Overloaded,
    QuireError,
    ServerError,
    Unavailable,
    Unreachable,
)

ERROR_CODE_TRAILER = "quire-error-code"
"""Trailer with the code that Quire gives an error, such as context_length_exceeded; absent if gRPC
itself failed."""
RETRY_TRAILER = "grpc-retry-pushback-ms"

_BY_STATUS: dict[grpc.StatusCode, type[QuireError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
    grpc.StatusCode.UNIMPLEMENTED: InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: NotAllowed,
    grpc.StatusCode.PERMISSION_DENIED: NotAllowed,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: Conflict,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
}
"""RESOURCE_EXHAUSTED becomes Overloaded; every other status that is missing here becomes
ServerError."""

_NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
"""Statuses that gRPC sets itself if no server answers; the error then has no ERROR_CODE_TRAILER.
A gRPC server answers a call that arrives just as it stops with CANCELLED."""


@contextmanager
def translate_errors(address: str) -> Iterator[None]:
    """Raise gRPC's errors as errors of `quire.errors`, whose texts name the server's address."""
    try:
        yield
    except grpc.RpcError as error:
        raise _from_rpc(error, address) from error


def _from_rpc(error: grpc.RpcError, address: str) -> QuireError:
    # Every RpcError that gRPC raises is also a Call, although its type does not say so.
    assert isinstance(error, grpc.Call | grpc.aio.AioRpcError)
    status = error.code()
    message = error.details() or status.name
    trailers = {str(key): str(value) for key, value in error.trailing_metadata() or ()}
    code = trailers.get(ERROR_CODE_TRAILER)
    if status in _NO_ANSWER and code is None:
        # What listens for a gateway that is down, such as Docker's proxy, accepts connections and
        # closes them: a connection lost in the handshake says nothing against its certificate.
        is_lost = "Handshake read failed" in message or "Handshake write failed" in message
        if not is_lost and ("andshake" in message or "certificate" in message.lower()):
            return BadTls(f"the TLS handshake with {address} failed: {message}")
        is_stopping = status is grpc.StatusCode.CANCELLED
        code = STOPPING if is_stopping else "unreachable"
        return Unreachable(f"no server answers at {address}", code)
    if status is grpc.StatusCode.UNIMPLEMENTED:
        message = (
            f"{address} does not serve this call; operations are served at an address of their own "
            "(`quire workers --help`)"
        )
    code = code or status.name.lower()
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED:
        delay_ms = trailers.get(RETRY_TRAILER)
        return Overloaded(message, code, int(delay_ms) / 1000 if delay_ms else None)
    return _BY_STATUS.get(status, ServerError)(message, code)
