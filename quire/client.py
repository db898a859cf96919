"""The client library for threads and scripts; `quire.async_client` has the one for asyncio.

Both call a gateway over gRPC and raise the errors of `quire.errors`.
"""

import time
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import grpc

from quire import calls, messages
from quire.calls import Call, ClientBase
from quire.connections import Connection, Connections
from quire.error_translation import translate_errors
from quire.errors import QuireError
from quire.messages import Request
from quire.progress import Progress
from quire.types import Completion, Delta, Prompt, Sampling

P = ParamSpec("P")
T = TypeVar("T")


class Stream:
    """Iterates over the deltas of one request as they arrive.

    If the gateway goes away, the stream resumes at the next gateway. `cancel`, or the end of the
    stream's `with` block, cancels an unfinished request in every service.
    """

    def __init__(self, gateways: Connections, progress: Progress) -> None:
        self._gateways = gateways
        self._progress = progress
        self._cancelled = False
        self._connection, self._call = self._begin()
        self._deltas = self._read()

    def __iter__(self) -> Iterator[Delta]:
        return self._deltas

    def _begin(self) -> tuple[Connection, Any]:
        connection, progress = self._gateways.current, self._progress
        return connection, connection.inference.Generate(
            progress.message(), timeout=progress.timeout_s()
        )

    def _read(self) -> Iterator[Delta]:
        while True:
            self._gateways.check_process()
            try:
                with translate_errors(self._connection.address):
                    for response in self._call:
                        self._progress.record_response(response)
                        yield from messages.deltas(response)
                        self._gateways.check_process()
                return
            except QuireError as error:
                if self._cancelled:
                    raise
                pause_s = self._progress.record_break(error, self._call.initial_metadata())
                if pause_s is None:
                    return
            self._gateways.switch_from(self._connection)
            time.sleep(pause_s)
            self._connection, self._call = self._begin()
            if self._cancelled:  # meanwhile, by another thread
                self._call.cancel()

    def cancel(self) -> None:
        if self._gateways.are_forked:
            return  # the call is the parent's
        self._cancelled = True
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.cancel()


def _asked(make: Callable[Concatenate[Any, P], Call[T]]) -> Callable[Concatenate[Any, P], T]:
    """Return the method that makes a call and waits for its result."""

    @wraps(make)
    def method(self: "Client", /, *args: P.args, **kwargs: P.kwargs) -> T:
        call = make(self, *args, **kwargs)
        with self._servers(call).use_current() as server:
            return call.read(call.start(server))

    return method


class Client(ClientBase[Stream]):
    """A client of a gateway at `address` (host:port), or of several gateways of one deployment
    (host:port,host:port).

    The client uses one gateway at a time, and the next one when a stream to it breaks. A broken
    stream resumes at another gateway, or at the same one if it returns within `resume_window_s`.
    Threads may share a client.

    `pools`, `workers`, `audit`, `drain`, `change_role`, `reload`, `scale`, `load_adapter`
    and `unload_adapter` are operations. A gateway serves them at a separate address, `operations`
    (unix:PATH or host:port). Without this address the client calls them at `address`, where a
    gateway serves operations only to the API keys of operators.

    `api_key` is sent with each call. `tls` is for addresses other than unix:PATH; None uses no TLS.
    """

    _library = grpc

    def send(self, request: Request, timeout_s: float | None = None) -> Stream:
        """Stream the answer to a request, which has more fields than `generate` has arguments."""
        return Stream(self._gateways, self._progress(request, timeout_s))

    def complete(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        model: str = "",
        timeout_s: float | None = None,
    ) -> Completion:
        """Wait for the whole answer, with `sampling.n` sequences."""
        with self.generate(prompt, sampling, model=model, timeout_s=timeout_s) as stream:
            return messages.completion(list(stream))

    is_ready = _asked(calls.is_ready)
    models = _asked(calls.models)
    pools = _asked(calls.pools)
    workers = _asked(calls.workers)
    embed = _asked(calls.embed)
    explain = _asked(calls.explain)
    audit = _asked(calls.audit)
    drain = _asked(calls.drain)
    change_role = _asked(calls.change_role)
    reload = _asked(calls.reload)
    scale = _asked(calls.scale)
    upgrade = _asked(calls.upgrade)
    load_adapter = _asked(calls.load_adapter)
    unload_adapter = _asked(calls.unload_adapter)

    def close(self) -> None:
        if self._gateways.are_forked:
            return  # the connections are the parent's
        for connection in (*self._gateways, *self._operations):
            connection.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
