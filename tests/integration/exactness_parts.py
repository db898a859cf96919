"""A worker and a call of a deployment of the exactness tests, as its conditions see them."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry

from quire.types import Delta
from services.engine.forward import ForwardPass
from services.worker.pool_engine import WorkerParts
from tests.exactness import Answer

from .exactness_model import LIMIT_S, Watched


@dataclass(eq=False)
class DeployedWorker:
    """A worker with its engine's forward pass and its metrics."""

    worker: Any
    forward: Watched
    parts: WorkerParts
    request_metrics: CollectorRegistry
    running: "asyncio.Task[None]"

    @property
    def device(self) -> ForwardPass:
        return self.parts.forward

    def figure(self, name: str) -> float:
        value = self.request_metrics.get_sample_value(f"quire:{name}_total")
        assert value is not None
        return value

    @property
    def num_seen(self) -> int:
        """How many tokens of the compared request the worker has computed."""
        return sum(row.num_tokens for row in self.forward.seen)


@dataclass(eq=False)
class Call:
    """A request of a client. `deltas`: all that the client has received."""

    deltas: list[Delta] = field(default_factory=list)
    reading: "asyncio.Task[None]" = field(init=False)

    async def answer(self) -> Answer:
        async with asyncio.timeout(LIMIT_S):
            await self.reading
        return Answer.of(self.deltas)
