"""The client library for asyncio."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import grpc.aio

from quire import calls, messages
from quire.calls import Call, ClientBase
from quire.error_translation import translate_errors
from quire.errors import QuireError
from quire.messages import Request
from quire.progress import Progress
from quire.types import Completion, Delta, Prompt, Sampling

P = ParamSpec("P")
T = TypeVar("T")


class AsyncStream:
    """`Stream` for asyncio. Asking for the first delta sends the request.

    The end of the stream's `async with` block, or `aclose`, cancels an unfinished request in every
    service.
    """

    def __init__(self, deltas: AsyncGenerator[Delta, None]) -> None:
        self._deltas = deltas

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        return await anext(self._deltas)

    async def aclose(self) -> None:
        await self._deltas.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()


def _asked(
    make: Callable[Concatenate[Any, P], Call[T]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Return the method that makes a call and awaits its result."""

    @wraps(make)
    async def method(self: "AsyncClient", /, *args: P.args, **kwargs: P.kwargs) -> T:
        call = make(self, *args, **kwargs)
        with self._servers(call).use_current() as server:
            return call.read(await call.start(server))

    return method


class AsyncClient(ClientBase[AsyncStream]):
    """`Client` for asyncio. Create it inside a running event loop."""

    _library = grpc.aio

    def send(self, request: Request, timeout_s: float | None = None) -> AsyncStream:
        """Stream the answer to a request, which has more fields than `generate` has arguments."""
        return AsyncStream(self._deltas(self._progress(request, timeout_s)))

    async def _deltas(self, progress: Progress) -> AsyncGenerator[Delta, None]:
        while True:
            connection = self._gateways.current
            call = connection.inference.Generate(progress.message(), timeout=progress.timeout_s())
            try:
                with translate_errors(connection.address):
                    async for response in call:
                        progress.record_response(response)
                        for delta in messages.deltas(response):
                            yield delta
                return
            except QuireError as error:
                pause_s = progress.record_break(error, await call.initial_metadata())
                if pause_s is None:
                    return
            finally:
                call.cancel()
            self._gateways.switch_from(connection)
            await asyncio.sleep(pause_s)

    async def complete(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        model: str = "",
        timeout_s: float | None = None,
    ) -> Completion:
        """Wait for the whole answer, with `sampling.n` sequences."""
        async with self.generate(prompt, sampling, model=model, timeout_s=timeout_s) as stream:
            return messages.completion([delta async for delta in stream])

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

    async def close(self) -> None:
        for connection in (*self._gateways, *self._operations):
            await connection.channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()
