"""The document that the dashboard shows: this gateway's requests and latencies, all workers and
pools. It has no text of a prompt or an answer."""

import asyncio
import time
from collections import deque
from itertools import islice, pairwise
from typing import Any, NoReturn

from prometheus_client.metrics import MetricWrapperBase

from services.gateway.dashboard.block_maps import BlockMaps
from services.gateway.request.events import Phase
from services.gateway.request.record import Record, now_ms
from services.gateway.request.request import Request
from services.gateway.wiring import Wiring
from services.gateway.workers.worker import Worker
from services.runtime.metrics import GatewayMetrics

MAX_RUNNING = 100
MAX_RECENT = 40
_MAX_ID_CHARS = 64
_SAMPLE_INTERVAL_S = 5.0
_NUM_SAMPLES = 120
_LOST_S = 60.0
"""How long a worker that is gone is still listed, as lost."""

_WAITING = (Phase.WAITING, Phase.PREFILL, Phase.PREEMPTED, Phase.LOST)
"""The phases in which a client waits for its next token: in a queue, whether a gateway's or a
prefill worker's, or for its prompt."""


class DashboardDocument:
    def __init__(self, wiring: Wiring, metrics: GatewayMetrics, block_maps: BlockMaps) -> None:
        self._gateway_id = wiring.gateway_id
        self._directory = wiring.directory
        self._dispatcher = wiring.dispatcher
        self._records = wiring.explainer.records
        self._metrics = metrics
        self._block_maps = block_maps
        self._history: deque[list[float]] = deque(maxlen=_NUM_SAMPLES)
        """Samples of the last ten minutes, for a page that opens only now."""
        self._seen_workers: dict[str, tuple[float, dict[str, Any]]] = {}

    async def keep_history(self) -> NoReturn:
        while True:
            self._history.append(self._sample())
            await asyncio.sleep(_SAMPLE_INTERVAL_S)

    async def build(self) -> dict[str, Any]:
        """At most MAX_RUNNING + MAX_RECENT requests, however many there are."""
        await self._block_maps.update()
        waiting = self._waiting()
        now = now_ms()
        oldest_ms = min((_waits_since_ms(each) for each in waiting), default=now)
        return {
            "now_ms": now,
            "gateway": self._gateway_id,
            "models": list(self._directory.model_names()),
            "block_manager": self._block_maps.is_current,
            "num_running": len(self._dispatcher.requests) - len(waiting),
            "num_waiting": len(waiting) + self._dispatcher.num_admitting,
            "oldest_wait_ms": now - oldest_ms,
            "workers": self._workers(),
            "requests": self._requests(),
            "pools": await self._pools(),
            "ttft": _buckets(self._metrics.time_to_first_token_s),
            "inter_token": _buckets(self._metrics.inter_token_latency_s),
            "generated_tokens": _total(self._metrics.generation_tokens),
            "prompt_tokens": _total(self._metrics.prompt_tokens),
            "cached_tokens": _total(self._metrics.prompt_tokens_cached),
            "preemptions": _total(self._metrics.num_preemptions),
            "moves": _total(self._metrics.num_moves),
            "failures": self._failures(),
            "history": list(self._history),
        }

    async def _pools(self) -> dict[str, Any]:
        """The block maps, with the names of the retained prefixes."""
        names_of, pools = self._dispatcher.retention.names, self._block_maps.pools
        return {
            pool_id: {**pool, "names": await names_of(pool_id) if pool["retained"] else []}
            for pool_id, pool in pools.items()
        }

    def _waiting(self) -> list[Request]:
        """The requests that have no token yet, or lost their place at a worker."""
        requests = self._dispatcher.requests
        return [each for each in requests if each.record.phase in _WAITING]

    def _failures(self) -> dict[str, float]:
        """The requests that failed or were refused since the start, by error code. A request whose
        client has left did not fail."""
        numbers: dict[str, float] = {}
        for sample in _samples(self._metrics.requests_failed, "_total"):
            code = sample.labels["code"]
            if code != "cancelled":
                numbers[code] = numbers.get(code, 0.0) + sample.value
        return numbers

    def _sample(self) -> list[float]:
        """Unix ms, running and waiting requests; tokens and failures since the start."""
        num_waiting = len(self._waiting())
        return [
            now_ms(),
            len(self._dispatcher.requests) - num_waiting,
            num_waiting + self._dispatcher.num_admitting,
            _total(self._metrics.generation_tokens),
            sum(self._failures().values()),
        ]

    def _requests(self) -> dict[str, Any]:
        """First those that run: a long queue hides none of them."""
        in_order = sorted(
            self._dispatcher.requests,
            key=lambda each: (each.record.phase is Phase.WAITING, each.order),
        )
        running = (each.record for each in islice(in_order, MAX_RUNNING))
        ended = (each for each in self._records if each.stats)
        shown = (*islice(ended, MAX_RECENT), *running)
        return {str(each.order): _request(each) for each in shown}

    def _workers(self) -> dict[str, Any]:
        """The workers of the directory, and those that left it a moment ago."""
        now = time.monotonic()
        fenced = {each for pool in self._block_maps.pools.values() for each in pool["fenced"]}
        present = {
            worker.id: _worker(worker, is_fenced=worker.id in fenced)
            for worker in self._directory.workers
        }
        self._seen_workers |= {worker_id: (now, view) for worker_id, view in present.items()}
        self._seen_workers = {
            worker_id: (seen_at, view)
            for worker_id, (seen_at, view) in self._seen_workers.items()
            if now - seen_at < _LOST_S
        }
        gone = self._seen_workers.keys() - present.keys()
        lost = {each: {**self._seen_workers[each][1], "state": "gone"} for each in gone}
        return {**present, **lost}


def _waits_since_ms(request: Request) -> int:
    """When the first of the phases began in which the request now waits, one after the other."""
    since_ms = now_ms()
    for phase, began_ms, _ in reversed(request.record.spans):
        if phase not in _WAITING:
            break
        since_ms = began_ms
    return since_ms


def _request(record: Record) -> dict[str, Any]:
    stats = record.stats
    assert stats is not None
    view = {
        "id": record.request_id[:_MAX_ID_CHARS],
        "model": record.model,
        "sequences": record.num_sequences,
        "prompt": stats.num_prompt_tokens,
        "cached": stats.num_cached_tokens,
        "tokens": stats.num_generated_tokens,
        "preemptions": stats.num_preemptions,
        "moves": stats.num_moves,
        "spans": [[phase.value, *begin] for phase, *begin in record.spans],
    }
    if record.outcome:
        view |= {"ended_ms": record.ended_ms, "outcome": record.outcome}
    return view


def _worker(worker: Worker, *, is_fenced: bool) -> dict[str, Any]:
    """A worker that does not answer has neither load nor slots: its last report no longer holds."""
    member, answers = worker.member, worker.connected
    return {
        "role": member.role,
        "state": _state(worker, is_fenced=is_fenced),
        "pool": member.pool_id,
        "model": member.model,
        "running": worker.num_running if answers else 0,
        "slots": worker.num_slots if answers else 0,
        # An estimate, which may be more than all for a moment after a request has ended.
        "free_slots": min(worker.num_free_slots, worker.num_slots) if answers else 0,
        "pending_tokens": worker.num_pending_tokens if answers else 0,
        "engine": dict(member.engine),
        "started_ms": member.started_unix_ms,
    }


def _state(worker: Worker, *, is_fenced: bool) -> str:
    if is_fenced:
        return "fenced"
    if not worker.connected:
        return "unreachable"
    if worker.draining:
        return "draining"
    return "serving"


def _buckets(histogram: MetricWrapperBase) -> dict[str, list[float]]:
    """The bounds in seconds, without infinity, and the number of values in each bucket, of all
    models together."""
    cumulative: dict[float, float] = {}
    for sample in _samples(histogram, "_bucket"):
        bound = float(sample.labels["le"])
        cumulative[bound] = cumulative.get(bound, 0) + sample.value
    bounds = sorted(cumulative)
    below = [0.0, *(cumulative[bound] for bound in bounds)]
    counts = [high - low for low, high in pairwise(below)]
    return {"bounds": bounds[:-1], "counts": counts}


def _total(counter: MetricWrapperBase) -> float:
    return float(sum(sample.value for sample in _samples(counter, "_total")))


def _samples(metric: MetricWrapperBase, suffix: str) -> list[Any]:
    families = metric.collect()
    return [s for family in families for s in family.samples if s.name.endswith(suffix)]
