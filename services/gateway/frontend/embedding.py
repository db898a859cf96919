"""Requests for embeddings: requests for text that end with their prefill."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from quire.types import Usage
from services.gateway.api import (
    Deltas,
    GenerationRequest,
    Prompt,
    RequestedEmbedding,
    RequestedSampling,
)

R = TypeVar("R")
T = TypeVar("T")
Generate = Callable[[GenerationRequest], Deltas]

AT_ONCE = 64
"""Inputs of one body that wait or run at a time: the rest does not fill the queue."""


@dataclass(frozen=True, slots=True)
class Embedding:
    values: tuple[float, ...]
    usage: Usage
    request_id: str


def embedding_request(
    prompt: Prompt, request_id: str, model: str, dimensions: int | None, **fields: Any
) -> GenerationRequest:
    """`fields`: more fields of the request."""
    sampling = RequestedSampling(max_tokens=1, embedding=RequestedEmbedding(dimensions))
    return GenerationRequest(prompt, request_id, model, sampling, **fields)


async def embed(generate: Generate, request: GenerationRequest) -> Embedding:
    """Raises as `Generator.generate`, which `generate` is."""
    async with generate(request) as deltas:
        *_, last = [delta async for delta in deltas]
    assert last.usage is not None
    return Embedding(last.embedding, last.usage, last.request_id)


async def in_order(
    answer: Callable[[R], Awaitable[T]], requests: Iterable[R], at_once: int
) -> list[T]:
    """The answers to all requests, of which `at_once` run at a time. The first error ends all."""
    places = asyncio.Semaphore(at_once)

    async def one(request: R) -> T:
        async with places:
            return await answer(request)

    tasks = [asyncio.create_task(one(request)) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
