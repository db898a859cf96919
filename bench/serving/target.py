"""A server that is measured: Quire's gateway over gRPC, or any with OpenAI's HTTP API, by the
load generator of `quire bench`."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from quire.async_client import AsyncClient
from quire.bench import target
from quire.bench.target import RequestFailed
from quire.types import Sampling

__all__ = ["GatewayTarget", "HttpTarget", "Prompt", "RequestFailed", "Target"]

Prompt = list[int] | str


class Target(Protocol):
    def stream(self, prompt: Prompt, num_tokens: int) -> AsyncGenerator[int, None]:
        """Exactly `num_tokens`, greedy; yields how many came together. Closing it cancels the
        request. RequestFailed."""

    async def close(self) -> None: ...


class Counted:
    """Yields only the numbers of tokens of a target's chunks."""

    def __init__(self, counted: target.Target) -> None:
        self._target = counted

    async def stream(self, prompt: Prompt, num_tokens: int) -> AsyncGenerator[int, None]:
        """Yields the tokens of each chunk. Tokens that only the server counts (characters that end
        late) are added to the last chunk."""
        total = 0
        async with aclosing(self._target.stream(target.Call(prompt, num_tokens))) as chunks:
            async for chunk in chunks:
                reported = chunk.num_output_tokens
                missing = 0 if reported is None else reported - total - chunk.num_tokens
                count = chunk.num_tokens + max(missing, 0)
                total += count
                if count:
                    yield count

    async def close(self) -> None:
        await self._target.close()


class GatewayTarget(Counted):
    """Quire at `address` (host:port). Make it inside a running loop."""

    def __init__(self, address: str) -> None:
        sampling = Sampling(temperature=0.0, ignore_eos=True)
        super().__init__(target.GrpcTarget(AsyncClient(address, resume_window_s=0.0), "", sampling))


class HttpTarget(Counted):
    """A server at `url` with `POST /v1/completions`. Make it inside a running loop."""

    def __init__(self, url: str, model: str) -> None:
        fields = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        super().__init__(target.HttpTarget(url, model, fields=fields))
