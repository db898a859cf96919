"""The servers that can be measured: any with OpenAI's HTTP API, and Quire over gRPC."""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

import aiohttp

from quire.async_client import AsyncClient
from quire.connections import Tls
from quire.errors import DeadlineExceeded, QuireError, Unreachable
from quire.messages import Request
from quire.types import ChatMessage, Prompt, Sampling


class RequestFailed(Exception):
    """A request got no whole answer. `kind` is a short name to count by, such as `http 429`."""

    def __init__(self, text: str, kind: str = "failed") -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Call:
    """A request. A prompt of messages goes through the model's chat template."""

    prompt: Prompt
    num_tokens: int


class Chunk(NamedTuple):
    """Tokens that came together. The last chunk has the server's counts (`usage`), if the server
    sends them: they replace the sum of `num_tokens`."""

    num_tokens: int
    text: str = ""
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None


class Target(Protocol):
    """A server. Make it inside a running event loop."""

    def stream(self, call: Call) -> AsyncGenerator[Chunk, None]:
        """Send a request; closing the iterator cancels it. Raises RequestFailed."""

    async def close(self) -> None: ...


_FAILURES = (
    *(aiohttp.ClientError, TimeoutError),
    *(ValueError, LookupError, TypeError, AttributeError),  # the answer has another form
)


class HttpTarget:
    """A server with `POST /v1/completions` and `/v1/chat/completions`.

    Where chunks do not carry `token_ids` (vLLM and Quire send them), each counts as one token.
    `fields` are what every request's body has besides prompt and length.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        api_key: str | None = None,
        tls: Tls | None = None,
        timeout_s: float = 600.0,
        fields: Mapping[str, Any] = {},
    ) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else None
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=tls.context() if tls else True),
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(timeout_s, 30.0)),
            headers=headers,
        )
        self._fields = {
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
        }

    async def models(self) -> list[str]:
        """The names of the served models. Raises RequestFailed."""
        try:
            async with self._session.get(f"{self._url}/v1/models") as response:
                await _require_success(response)
                listed = await response.json(content_type=None)
                return [model["id"] for model in listed["data"]]
        except RequestFailed as error:
            text = f"the server does not list its models: {error}; name one with --model"
            raise RequestFailed(text, error.kind) from error
        except _FAILURES as error:
            raise _failure(error, self._url) from error

    async def stream(self, call: Call) -> AsyncGenerator[Chunk, None]:
        path, body = self._request(call)
        try:
            async with self._session.post(f"{self._url}/v1/{path}", json=body) as response:
                await _require_success(response)
                has_ended = False
                async for line in _lines(response.content):
                    if line == b"[DONE]":
                        has_ended = True
                    elif (chunk := _chunk(json.loads(line))) is not None:
                        yield chunk
        except _FAILURES as error:
            raise _failure(error, self._url) from error
        if not has_ended:
            text, kind = "the stream ended without [DONE]", response.content_type
            if kind != "text/event-stream":
                text += f"; the answer is {kind}, not text/event-stream"
            raise RequestFailed(text, "broken stream")

    def _request(self, call: Call) -> tuple[str, dict[str, Any]]:
        body = self._fields | {"max_tokens": call.num_tokens}
        if _is_chat(call.prompt):
            return "chat/completions", body | {"messages": [asdict(each) for each in call.prompt]}  # type: ignore[arg-type]
        return "completions", body | {"prompt": call.prompt}

    async def close(self) -> None:
        await self._session.close()


class GrpcTarget:
    """Quire's gateway. `client` is closed with the target."""

    def __init__(
        self, client: AsyncClient, model: str, sampling: Sampling, timeout_s: float = 600.0
    ) -> None:
        self._client = client
        self._model = model
        self._sampling = asdict(sampling)
        self._timeout_s = timeout_s

    async def stream(self, call: Call) -> AsyncGenerator[Chunk, None]:
        sampling = Sampling(**self._sampling | {"max_tokens": call.num_tokens})
        request = Request(call.prompt, sampling, self._model)
        try:
            async with self._client.send(request, self._timeout_s) as deltas:
                async for delta in deltas:
                    usage = delta.usage
                    yield Chunk(
                        len(delta.token_ids),
                        delta.text,
                        usage.num_prompt_tokens if usage else None,
                        usage.num_generated_tokens if usage else None,
                    )
        except QuireError as error:
            kinds = {Unreachable: "no connection", DeadlineExceeded: "timeout"}
            raise RequestFailed(str(error), kinds.get(type(error), error.code)) from error

    async def close(self) -> None:
        await self._client.close()


def _is_chat(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], ChatMessage)


async def _require_success(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        text = (await response.read())[:500].decode(errors="replace")
        if "ignore_eos" in text:
            text += " (--no-ignore-eos leaves the field ignore_eos out)"
        raise RequestFailed(f"status {response.status}: {text}", f"http {response.status}")


async def _lines(content: aiohttp.StreamReader) -> AsyncGenerator[bytes, None]:
    """The data of the server-sent events, as they come."""
    rest = b""
    async for piece in content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _chunk(event: dict[str, Any]) -> Chunk | None:
    """Return the chunk of an event, or None if the event has neither tokens nor counts, such as the
    first event of a chat, which has only a role."""
    if "error" in event:
        raise RequestFailed(json.dumps(event["error"])[:500], "error in stream")
    num_tokens, text = 0, ""
    for choice in event.get("choices") or ():
        more = _text(choice)
        ids: Sequence[int] | None = choice.get("token_ids")
        num_tokens += len(ids) if ids is not None else bool(more)
        text += more
    usage = event.get("usage") or {}
    if not (num_tokens or text or usage):
        return None
    return Chunk(num_tokens, text, usage.get("prompt_tokens"), usage.get("completion_tokens"))


def _text(choice: dict[str, Any]) -> str:
    """Return the text of a completion or a chat; reasoning is generated text too."""
    delta = choice.get("delta") or {}
    reasoning = delta.get("reasoning") or delta.get("reasoning_content")  # newer and older name
    parts = (choice.get("text"), reasoning, delta.get("content"))
    return "".join(filter(None, parts))


def _failure(error: Exception, url: str) -> RequestFailed:
    if isinstance(error, asyncio.TimeoutError):
        return RequestFailed("the time limit of the request has passed", "timeout")
    if isinstance(error, aiohttp.ClientConnectorError):
        return RequestFailed(f"no server answers at {url}: {error.os_error}", "no connection")
    if isinstance(error, aiohttp.ClientError):
        return RequestFailed(f"{type(error).__name__}: {error}", "broken stream")
    return RequestFailed(f"the answer is not as OpenAI's: {error}", "bad answer")
