"""The model queue: the waiting requests of one model, and a forecast of their times."""

import asyncio
from dataclasses import dataclass, field

from services.gateway.frontend.api import GenerationRequest
from services.gateway.request.lifecycle import RequestLifecycle
from services.gateway.scheduling.client_shares import ClientShares
from services.gateway.scheduling.forecast import Forecast
from services.gateway.scheduling.request_queue import RequestQueue
from services.gateway.scheduling.router import Pool

_MARGIN = 1.5
"""A forecast is a mean. Without a margin, half of the requests that just meet their deadline in the
forecast would miss it, and their work would be lost."""


@dataclass(slots=True)
class ModelQueue:
    """`num_admitting`: requests in admission, which will wait next. `without_workers_since`: when
    the model lost its workers; None: it has some, or they are starting."""

    model: str
    waiting: RequestQueue[RequestLifecycle] = field(default_factory=RequestQueue)
    shares: ClientShares = field(default_factory=ClientShares)
    forecast: Forecast = field(default_factory=Forecast)
    num_admitting: int = 0
    without_workers_since: float | None = None
    task: asyncio.Task[None] | None = None

    def deadline_problem(
        self, request: GenerationRequest, left_s: float, pools: tuple[Pool, ...], now: float
    ) -> str:
        """Why a new request cannot end within `left_s`, with the numbers; "" if it can, or if it
        need not wait: then it delays no other request."""
        num_ahead = self.waiting.num_ahead(request.priority, now) + self.num_admitting
        num_ahead += self.shares.num_outside(request)
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
        """Whether the first request cannot meet its deadline any more while others wait."""
        request = lifecycle.client.request
        deadline, sampling = request.deadline, request.sampling
        if deadline is None or len(self.waiting) == 1 or lifecycle.started_at is not None:
            return False
        run_time_s = self.forecast.run_time_s(sampling.max_tokens, ignore_eos=sampling.ignore_eos)
        return now + run_time_s > deadline
