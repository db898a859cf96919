"""An OpenAI-compatible server around OpenVINO GenAI's pipeline; run by its own interpreter.

    python openvino_server.py --model DIR --port 8100 [--threads 2] [--max-num-seqs 64]
        [--activation-group 32]

`POST /v1/completions` with `prompt` (token ids), `max_tokens`, `stream`; `GET /health`. Greedy, and
an end of sequence does not end it. It answers token ids and makes no text of them, so that the
pipeline is charged with nothing of ours that can be left out.

One thread steps the pipeline; what a step produced crosses to the event loop in one call.
"""

import argparse
import asyncio
import itertools
import json
import queue
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import uvicorn
from engine import OpenVino  # type: ignore[import-not-found]  # beside this file
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route


@dataclass(eq=False, slots=True)
class Request:
    """`steps` has what each step gave it; None ends it. `cancelled`: its client has gone."""

    prompt: list[int]
    max_tokens: int
    steps: asyncio.Queue[list[int] | None] = field(default_factory=asyncio.Queue)
    cancelled: bool = False


class Pipeline:
    """The engine's thread, and the requests that run on it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._engine = OpenVino(options, serves=True)
        self._arrived: queue.Queue[Request] = queue.Queue()
        self._requests: dict[int, Request] = {}
        self._numbers = itertools.count()
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._work, daemon=True).start()

    def submit(self, request: Request) -> None:
        self._arrived.put(request)

    def _work(self) -> None:
        while True:
            while not self._requests or not self._arrived.empty():
                request, number = self._arrived.get(), next(self._numbers)
                self._requests[number] = request
                self._engine.add(number, request.prompt, request.max_tokens)
            gained = self._engine.step()
            steps = [(self._requests[number], ids) for number, ids in gained.items()]
            self._loop.call_soon_threadsafe(_deliver, [*steps, *self._ended()])

    def _ended(self) -> Iterator[tuple[Request, None]]:
        """The requests that run no more, after those whose client has gone are cancelled."""
        for number, request in list(self._requests.items()):
            if request.cancelled and number in self._engine.running:
                self._engine.running.pop(number).cancel()
            if number not in self._engine.running:
                yield self._requests.pop(number), None


def _deliver(gained: list[tuple[Request, list[int] | None]]) -> None:
    for request, ids in gained:
        request.steps.put_nowait(ids)


def app(options: argparse.Namespace) -> Starlette:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.pipeline = Pipeline(options)
        yield

    async def health(_: HttpRequest) -> JSONResponse:
        return JSONResponse({})

    async def complete(http: HttpRequest) -> StreamingResponse:
        body = await http.json()
        request = Request(body["prompt"], body["max_tokens"])
        http.app.state.pipeline.submit(request)
        return StreamingResponse(_events(request), media_type="text/event-stream")

    routes = [Route("/health", health), Route("/v1/completions", complete, methods=["POST"])]
    return Starlette(routes=routes, lifespan=lifespan)


async def _events(request: Request) -> AsyncIterator[str]:
    """Starlette cancels the answer of a client that has gone."""
    total = 0
    try:
        while (ids := await request.steps.get()) is not None:
            total += len(ids)
            choice = {"index": 0, "text": "", "token_ids": ids}
            yield f"data: {json.dumps({'choices': [choice]})}\n\n"
    finally:
        request.cancelled = True
    yield f"data: {json.dumps({'choices': [], 'usage': {'completion_tokens': total}})}\n\n"
    yield "data: [DONE]\n\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--activation-group", type=int, default=0)
    options = parser.parse_args()
    uvicorn.run(app(options), host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
