"""An OpenAI-compatible server with known delays, which generates nothing: what a load generator
reports of it can be checked, and how much a generator can take be measured.

    python -m tests.synthetic_server --port 8900 --ttft-ms 50 --itl-ms 10
"""

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass(slots=True)
class Synthetic:
    """Each answer's first token comes after `ttft_s`, each further one `itl_s` later.
    `statuses`: of the first requests, in turn. `cut_after`: the connection breaks after so many
    tokens. `written`: when each token of each request was written."""

    ttft_s: float = 0.0
    itl_s: float = 0.0
    statuses: list[int] = field(default_factory=list)
    cut_after: int | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    written: list[list[float]] = field(default_factory=list)

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[str]:
        """Yields the URL."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/{path:.*}", self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield "http://{}:{}".format(*runner.addresses[0])
        await runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "synthetic"}]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        arrived = time.perf_counter()
        body = await request.json()
        self.arrivals.append(arrived)
        self.bodies.append(body)
        if self.statuses and (status := self.statuses.pop(0)) != 200:
            return web.json_response({"error": {"message": "refused"}}, status=status)
        is_chat = "messages" in body
        token = {"delta": {"content": " word"}} if is_chat else {"text": " word"}
        kind = {"object": "chat.completion.chunk" if is_chat else "text_completion"}
        chunk = _event(kind | {"choices": [{"index": 0, "finish_reason": None, **token}]})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        written: list[float] = []
        self.written.append(written)
        num_tokens = body.get("max_tokens") or body["max_completion_tokens"]
        for index in range(num_tokens):
            if index == self.cut_after and request.transport is not None:
                request.transport.close()
                return response
            due = arrived + self.ttft_s + index * self.itl_s
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            written.append(time.perf_counter())
            await response.write(chunk)
        usage = {"prompt_tokens": _num_prompt_tokens(body), "completion_tokens": num_tokens}
        await response.write(_event(kind | {"choices": [], "usage": usage}))
        await response.write(b"data: [DONE]\n\n")
        return response


def _num_prompt_tokens(body: dict[str, Any]) -> int:
    """Words of text, or ids."""
    if "messages" in body:
        contents = (message["content"] for message in body["messages"])
        texts = (c if isinstance(c, str) else "".join(part["text"] for part in c) for c in contents)
        return sum(len(text.split()) for text in texts)
    prompt = body["prompt"]
    return len(prompt.split()) if isinstance(prompt, str) else len(prompt)


def _event(value: dict[str, Any]) -> bytes:
    head = {"id": "1", "created": 1, "model": "synthetic"}
    return b"data: " + json.dumps(head | value).encode() + b"\n\n"


async def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8900)
    parser.add_argument("--ttft-ms", type=float, default=50.0)
    parser.add_argument("--itl-ms", type=float, default=10.0)
    args = parser.parse_args()
    async with Synthetic(args.ttft_ms / 1000, args.itl_ms / 1000).serving(args.port):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
