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
import json
import queue
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy
import openvino  # type: ignore[import-not-found]
import openvino_genai as genai  # type: ignore[import-not-found]
import uvicorn
from engine import openvino_properties  # type: ignore[import-not-found]  # beside this file
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
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 4
        scheduler.max_num_seqs = options.max_num_seqs
        scheduler.enable_prefix_caching = True
        properties = openvino_properties(options.threads, options.activation_group)
        self._pipeline = genai.ContinuousBatchingPipeline(
            options.model, scheduler, "CPU", properties
        )
        self._arrived: queue.Queue[Request] = queue.Queue()
        self._running: dict[Request, Any] = {}
        self._num_requests = 0
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._work, daemon=True).start()

    def submit(self, request: Request) -> None:
        self._arrived.put(request)

    def _work(self) -> None:
        while True:
            while not self._running or not self._arrived.empty():
                self._admit(self._arrived.get())
            self._pipeline.step()
            self._loop.call_soon_threadsafe(_deliver, list(self._gained()))

    def _admit(self, request: Request) -> None:
        config = genai.GenerationConfig()
        config.max_new_tokens = request.max_tokens
        config.ignore_eos = True
        config.do_sample = False
        ids = openvino.Tensor(numpy.array([request.prompt], dtype=numpy.int64))
        self._num_requests += 1
        self._running[request] = self._pipeline.add_request(self._num_requests, ids, config)

    def _gained(self) -> Iterator[tuple[Request, list[int] | None]]:
        for request, generation in list(self._running.items()):
            while generation.can_read():
                (output,) = generation.read().values()
                yield request, list(output.generated_ids)
            if request.cancelled:
                generation.cancel()
            if generation.get_status() != genai.GenerationStatus.RUNNING:
                del self._running[request]
                yield request, None


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
