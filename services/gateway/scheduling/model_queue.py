"""The model queue: the waiting requests of one model."""

import asyncio
from dataclasses import dataclass, field

from services.gateway.request.request import Request
from services.gateway.scheduling.request_queue import RequestQueue


@dataclass(slots=True)
class ModelQueue:
    model: str
    waiting: RequestQueue[Request] = field(default_factory=RequestQueue)
    without_workers_since: float | None = None
    """When the model lost its workers; None if it has some, or they are starting."""
    task: asyncio.Task[None] | None = None
