"""One model's requests: who waits, and how long that takes."""

import asyncio
from dataclasses import dataclass, field

from services.gateway.frontend.api import GenerationRequest
from services.gateway.request.lifecycle import RequestLifecycle
from services.gateway.scheduling.forecast import Forecast
from services.gateway.scheduling.request_queue import RequestQueue
from services.gateway.scheduling.router import Pool

_MARGIN = 1.5
"""A forecast is a mean: of requests admitted at the very limit half would be late, and their work
for nothing."""


@dataclass(slots=True)
class ModelQueue:
    """`num_admitting`: requests that are being tokenized; they stand in line next."""

    model: str
    waiting: RequestQueue[RequestLifecycle] = field(default_factory=RequestQueue)
    forecast: Forecast = field(default_factory=Forecast)
    num_admitting: int = 0
    without_workers_since: float | None = None
    task: asyncio.Task[None] | None = None

    def deadline_problem(
        self, request: GenerationRequest, left_s: float, pools: tuple[Pool, ...], now: float
    ) -> str:
        """Why a new request cannot be done in `left_s`, with the numbers; "" when it can. Where
        nobody would have to wait there is nothing that it takes from others."""
        num_ahead = self.waiting.num_ahead(request.priority, now) + self.num_admitting
        num_free = sum(max(0, w.num_free_slots) for pool in pools for w in pool.open_decode())
        wait_s = self.forecast.wait_s(num_ahead, num_free, now, request.sampling.width)
        if not wait_s:
            return ""
        asked = request.sampling
        run_time_s = self.forecast.run_time_s(asked.max_tokens, ignore_eos=asked.ignore_eos)
        if _MARGIN * (wait_s + run_time_s) <= left_s:
            return ""
        return (
            f"{num_ahead} sequences go first: it would start in about {wait_s:.1f} s and take "
            f"{run_time_s:.1f} s; its deadline is in {left_s:.1f} s"
        )

    def misses_deadline(self, lifecycle: RequestLifecycle, now: float) -> bool:
        """Whether whoever is first now could only waste the work that others wait for."""
        request = lifecycle.client.request
        deadline, sampling = request.deadline, request.sampling
        if deadline is None or len(self.waiting) == 1 or lifecycle.started_at is not None:
            return False
        run_time_s = self.forecast.run_time_s(sampling.max_tokens, ignore_eos=sampling.ignore_eos)
        return now + run_time_s > deadline
