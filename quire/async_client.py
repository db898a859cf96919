"""The client library for asyncio."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Self, TypeVar

import grpc.aio

from quire import calls, messages
from quire.calls import Call, ClientBase
from quire.error_translation import translate_errors
from quire.errors import QuireError
from quire.messages import Request
from quire.progress import Progress
from quire.types import (
    Completion,
    Delta,
    Embedding,
    Model,
    Pool,
    PoolAudit,
    Prompt,
    Sampling,
    Scaled,
    Worker,
)

T = TypeVar("T")


class AsyncStream:
    """`Stream` for asyncio. The request is sent when the first delta is asked for.

    The end of the stream's `async with` block, or `aclose`, cancels an unfinished request at every
    hop.
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


class AsyncClient(ClientBase):
    """`Client` for asyncio. Create it inside a running event loop."""

    _library = grpc.aio

    def generate(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        model: str = "",
        timeout_s: float | None = None,
    ) -> AsyncStream:
        """Stream the answer to a text, token ids or a conversation."""
        return self.send(Request(prompt, sampling or Sampling(), model), timeout_s)

    def send(self, request: Request, timeout_s: float | None = None) -> AsyncStream:
        """Like `generate`, with every field of a request, and with a time limit for it."""
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

    async def embed(
        self,
        prompt: str | Sequence[int],
        dimensions: int | None = None,
        *,
        model: str = "",
        timeout_s: float | None = None,
    ) -> Embedding:
        return await self._ask(calls.embed(prompt, dimensions, model, timeout_s))

    async def is_ready(self) -> bool:
        return await self._ask(calls.IS_READY)

    async def models(self) -> tuple[Model, ...]:
        return await self._ask(calls.MODELS)

    async def pools(self) -> tuple[Pool, ...]:
        return await self._ask(calls.POOLS)

    async def workers(self) -> tuple[Worker, ...]:
        return await self._ask(calls.WORKERS)

    async def audit(self, pool_id: str = "", timeout_s: float = 60.0) -> tuple[PoolAudit, ...]:
        return await self._ask(calls.audit(pool_id, timeout_s))

    async def drain(self, worker_id: str, *, force: bool = False) -> int:
        return await self._ask(calls.drain(worker_id, force))

    async def scale(
        self, *, num_prefill: int | None = None, num_decode: int | None = None, model: str = ""
    ) -> Scaled:
        return await self._ask(calls.scale(num_prefill, num_decode, model))

    async def load_adapter(self, name: str, path: str, model: str = "") -> str:
        return await self._ask(calls.load_adapter(name, path, model))

    async def unload_adapter(self, name: str) -> None:
        await self._ask(calls.unload_adapter(name))

    async def _ask(self, call: Call[T]) -> T:
        with self._servers(call).use_current() as server:
            return call.read(await call.start(server))

    async def close(self) -> None:
        for connection in (*self._gateways, *self._operations):
            await connection.channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()
