"""Requests for embeddings: requests for text that end with their prefill."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from quire.types import Usage
from services.gateway.api import (
    GenerationRequest,
    Generator,
    RequestedEmbedding,
    RequestedSampling,
)

_AT_ONCE = 64
"""Inputs of one body that wait or run at a time: the rest does not fill the queue."""


@dataclass(frozen=True, slots=True)
class Embedding:
    values: tuple[float, ...]
    usage: Usage
    request_id: str


def embedding_request(
    prompt: str | tuple[int, ...], request_id: str, model: str, dimensions: int | None
) -> GenerationRequest:
    sampling = RequestedSampling(max_tokens=1, embedding=RequestedEmbedding(dimensions))
    return GenerationRequest(prompt, request_id, model, sampling)


async def embed(generator: Generator, request: GenerationRequest) -> Embedding:
    """Raises as `Generator.generate`."""
    async with aclosing(generator.generate(request)) as deltas:
        async for delta in deltas:
            if delta.usage is not None:  # the last one
                return Embedding(delta.embedding, delta.usage, delta.request_id)
    raise RuntimeError("a request for an embedding ended without an answer")


async def embed_all(generator: Generator, requests: Sequence[GenerationRequest]) -> list[Embedding]:
    """The embeddings in order. The first error ends all."""
    places = asyncio.Semaphore(_AT_ONCE)

    async def one(request: GenerationRequest) -> Embedding:
        async with places:
            return await embed(generator, request)

    tasks = [asyncio.create_task(one(request)) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
