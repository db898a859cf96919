"""A server interceptor: lets the server's guard admit calls, and maps exceptions of handlers to
gRPC statuses, for unary and streaming handlers.

A call is admitted before its message is read, so that a client that may not call takes no memory.
A failed call has the trailer `quire-error-code`, and `grpc-retry-pushback-ms` if a retry
may help. Cancellation passes through unchanged, because it is not an error.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import grpc
from grpc import aio

from services.runtime.errors import Overloaded
from services.runtime.logging import bind_request_id
from services.runtime.rpc.arrivals import SLOW_IF_OPEN_S, SLOW_S, Arrivals
from services.runtime.rpc.error_table import RETRY_S, Failure, failure_of
from services.runtime.rpc.message_bounds import SMALL_BYTES, check_counts
from services.runtime.tracing.context import TRACEPARENT, bind_traceparent

CODE_TRAILER = "quire-error-code"
RETRY_TRAILER = "grpc-retry-pushback-ms"
REQUEST_ID_METADATA = "x-request-id"

if TYPE_CHECKING:  # these classes are generic only in the stubs
    _Handler = grpc.RpcMethodHandler[Any, Any]
    _Context = aio.ServicerContext[Any, Any]
else:
    _Handler, _Context = grpc.RpcMethodHandler, aio.ServicerContext
_Call = Callable[[Any, _Context], Awaitable[Any]]
_Decode = Callable[[bytes], Any]
_Admit = Callable[[_Context], Awaitable[None]]

_UNGUARDED_PREFIX = "/grpc."
"""Prefix of health checks and reflection, which a guarded server answers without proof."""
MAX_OPEN_STREAMS = 4096
"""Streams of these at a time: anybody may watch a server's health for ever, for 25 KB each. Single
checks have no limit, since a server whose checks fail is restarted."""


class Guard(Protocol):
    """Admits the calls to one server."""

    async def admit(self, method: str, context: _Context) -> None:
        """Raises the error that refuses a call of `method` (/package.Service/Method)."""


class ErrorInterceptor(aio.ServerInterceptor):
    """Wraps every handler of the server. `guard` must admit each call before its handler runs."""

    def __init__(self, guard: Guard | None = None) -> None:
        self._guard = guard
        self._arrivals = Arrivals(SLOW_S)
        self._open_arrivals = Arrivals(SLOW_IF_OPEN_S)
        self._num_open_streams = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        is_open = method.startswith(_UNGUARDED_PREFIX)
        admit = None if self._guard is None or is_open else partial(self._guard.admit, method)
        arrivals = self._open_arrivals if is_open else self._arrivals
        if handler is None:
            return None
        call = _call_of(handler)
        if is_open and handler.response_streaming:
            call = self._bounded(call)
        return _wrapped(handler, call, admit, arrivals, is_open=is_open)

    def _bounded(self, call: _Call) -> _Call:
        async def bounded(request: Any, context: _Context) -> Any:
            if self._num_open_streams >= MAX_OPEN_STREAMS:
                raise Overloaded(
                    f"{MAX_OPEN_STREAMS} streams of health checks and reflection are open", RETRY_S
                )
            self._num_open_streams += 1
            try:
                return await call(request, context)
            finally:
                self._num_open_streams -= 1

        return bounded


def trailers(failure: Failure) -> tuple[tuple[str, str], ...]:
    """The trailing metadata of a failed call."""
    code = ((CODE_TRAILER, failure.code),)
    if failure.retry_delay_s is None:
        return code
    return (*code, (RETRY_TRAILER, str(round(failure.retry_delay_s * 1000))))


def _wrapped(
    handler: _Handler, call: _Call, admit: _Admit | None, arrivals: Arrivals, *, is_open: bool
) -> _Handler:
    """The handler with its guard. It takes a stream, also where the method takes one message: gRPC
    would read that message before the guard admits the call. `call` is the handler's method.
    Anybody may call it if it `is_open`."""
    decode: Any = handler.request_deserializer

    async def message(_stream: Any, context: _Context) -> Any:
        data = await arrivals.message(context)
        return await _decoded(data, decode) if decode else data

    async def messages(stream: Any, context: _Context) -> Any:
        return arrivals.messages(context, decode) if is_open else stream

    read = messages if handler.request_streaming else message
    guarded = _guarded(call, read, admit)
    make = (
        grpc.stream_stream_rpc_method_handler
        if handler.response_streaming
        else grpc.stream_unary_rpc_method_handler
    )
    reads_itself = is_open or not handler.request_streaming
    return make(guarded, None if reads_itself else decode, handler.response_serializer)


def _call_of(handler: _Handler) -> _Call:
    """The handler's method as a coroutine function. For an async generator it writes each yielded
    message; a cancelled call closes the generator at once, not at garbage collection."""
    method: Any = (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    )
    if not inspect.isasyncgenfunction(method):
        return method  # type: ignore[no-any-return]

    async def write_all(request: Any, context: _Context) -> None:
        async with aclosing(method(request, context)) as responses:
            async for response in responses:
                await context.write(response)

    return write_all


def _guarded(call: _Call, read: _Call, admit: _Admit | None) -> _Call:
    async def guarded(stream: Any, context: _Context) -> Any:
        _bind_metadata(context)
        try:
            if admit is not None:
                await admit(context)
            return await call(await read(stream, context), context)
        except aio.BaseError:  # the handler called abort, or gRPC raised it
            raise
        except Exception as error:
            failure = failure_of(error)
        await context.abort(failure.status, failure.text, trailers(failure))

    return guarded


async def _decoded(data: bytes, decode: _Decode) -> Any:
    """Decode a request. Raises InvalidRequest if decoding would create too many objects."""
    message = getattr(decode, "__self__", None)  # `decode` is FromString of this generated class
    if message is not None and len(data) > SMALL_BYTES:
        await asyncio.to_thread(check_counts, data, message)
    return decode(data)


def _bind_metadata(context: _Context) -> None:
    traceparent = ""
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID_METADATA and isinstance(value, str):
            bind_request_id(value)
        elif key == TRACEPARENT and isinstance(value, str):
            traceparent = value
    bind_traceparent(traceparent)
