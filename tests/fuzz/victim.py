"""A request of another client, which runs while clients send anything to the same gateway."""

import asyncio
import contextlib
from typing import Any

from hypothesis import HealthCheck, settings

from services.gateway.api import GenerationRequest, RequestedSampling
from tests.examples import examples
from tests.fuzz.deployment import LIMIT_S, Deployment, expected

FUZZ = settings(
    max_examples=examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
VICTIM = GenerationRequest(
    tuple(range(200, 210)),
    "victim",
    sampling=RequestedSampling(temperature=0.0, max_tokens=40),
    cache_salt="the victim's own",
)


@contextlib.asynccontextmanager
async def victim(deployment: Deployment) -> Any:
    """A request of another client that runs during the block; after it, the request has all its
    tokens, and nothing else is left."""
    tokens: list[int] = []

    async def read() -> None:
        async with deployment.assembly.gateway.generate(VICTIM) as deltas:
            async for delta in deltas:
                tokens.extend(delta.token_ids)

    reading = asyncio.create_task(read())
    await deployment.until(lambda: bool(tokens) or reading.done())
    async with asyncio.timeout(LIMIT_S):
        yield
        await reading
    assert tokens == expected(VICTIM.prompt, 40)  # type: ignore[arg-type]
    await deployment.until_idle()
