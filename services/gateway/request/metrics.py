"""Metrics and the one log line of each request."""

import asyncio
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Histogram

from blockstore.store import NO_TENANT
from services.gateway.access.caller import EVERYONE, Caller, current_caller
from services.gateway.identity import client_id
from services.gateway.output.output import RequestStats
from services.gateway.request.request import Request
from services.runtime.logging import get_logger
from services.runtime.metrics import GatewayMetrics, TenantLabels, TenantMetrics
from services.runtime.usage import Used

log = get_logger(__name__)

_MAX_TEXT_CHARS = 1000
"""Longest text from a client in one log line."""


class TokenMeter:
    """Records a request's time to first token, inter-token latencies and token count, and charges
    each token to the caller's account as it comes. `of_tenant` also gets the time to first
    token."""

    def __init__(
        self, metrics: GatewayMetrics, model: str, caller: Caller, of_tenant: Histogram | None
    ) -> None:
        self._ttft = metrics.time_to_first_token_s.labels(model)
        self._inter_token = metrics.inter_token_latency_s.labels(model)
        self._generated = metrics.generation_tokens.labels(model)
        self._charge = caller.account.charge
        self._of_tenant = of_tenant

    def first_token(self, after_s: float) -> None:
        self._ttft.observe(after_s)
        if self._of_tenant is not None:
            self._of_tenant.observe(after_s)

    def tokens(self, num_tokens: int, after_s: float | None) -> None:
        self._charge(num_tokens)
        if after_s is not None:
            self._inter_token.observe(after_s / num_tokens)
        self._generated.inc(num_tokens)


class RequestMeters:
    """Counts and logs the requests of a gateway when they are refused or end."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.metrics = self._metrics = GatewayMetrics(registry)
        self._tenants = TenantMetrics(registry)
        self._label = TenantLabels().of
        self.used: dict[str, Used] = {}
        """The tokens of requests that have ended, by tenant."""

    def meter(self, model: str, caller: Caller = EVERYONE) -> TokenMeter:
        of_tenant = None
        if caller.tenant:
            of_tenant = self._tenants.time_to_first_token_s.labels(self._label(caller.tenant))
        return TokenMeter(self._metrics, model, caller, of_tenant)

    def set_gauges(self, num_running: Callable[[], int], num_waiting: Callable[[], int]) -> None:
        """Set the functions that a scrape of the two gauges calls."""
        self._metrics.num_requests_running.set_function(num_running)
        self._metrics.num_requests_waiting.set_function(num_waiting)

    def record_refusal(self, request_id: str, model: str, code: str, reason: str) -> None:
        """Count a request that was refused before it entered its model queue, and write its one log
        line. `model` is a served model, or empty."""
        self._metrics.requests_failed.labels(model, code).inc()
        caller = current_caller(EVERYONE)
        if caller.tenant:
            self._tenants.requests.labels(self._label(caller.tenant), code).inc()
        log.info(
            "request_refused",
            **_caller_keys(caller),
            request_id=request_id[:_MAX_TEXT_CHARS],
            model=model,
            outcome=code,
            reason=reason[:_MAX_TEXT_CHARS],
        )

    def record_end(self, request: Request, error: Exception | None) -> None:
        """Count a request that has ended, and write its one log line."""
        stats = request.output.stats
        outcome = request.record.outcome
        duration_s = asyncio.get_running_loop().time() - stats.arrived_at
        self._count_end(request, outcome, duration_s)
        log.info(
            "request_ended",
            **_caller_keys(request.asked.caller),
            request_id=client_id(request.id),
            model=request.model,
            outcome=outcome,
            reason=None if error is None else str(error),
            num_prompt_tokens=stats.num_prompt_tokens,
            num_cached_tokens=stats.num_cached_tokens,
            num_sequences=request.sampling.n or 1,
            num_generated_tokens=stats.num_generated_tokens,
            num_accepted_drafts=stats.num_accepted_drafts,
            num_rejected_drafts=stats.num_rejected_drafts,
            num_preemptions=stats.num_preemptions,
            num_moves=stats.num_moves,
            num_attempts=request.num_attempts,
            time_to_first_token_ms=round(stats.time_to_first_token_s * 1000, 1),
            duration_ms=round(duration_s * 1000, 1),
            **({} if request.trace is None else {"trace_id": request.trace.trace_id}),
        )

    def _count_end(self, request: Request, outcome: str, duration_s: float) -> None:
        caller, output = request.asked.caller, request.output
        metrics, model, stats = self._metrics, request.model, output.stats
        metrics.e2e_request_latency_s.labels(model).observe(duration_s)
        metrics.prompt_tokens.labels(model).inc(stats.num_prompt_tokens)
        metrics.prompt_tokens_cached.labels(model).inc(stats.num_cached_tokens)
        metrics.num_preemptions.labels(model).inc(stats.num_preemptions)
        metrics.num_moves.labels(model).inc(stats.num_moves)
        if request.started_at is not None:
            queued_s = request.started_at - stats.arrived_at
            metrics.request_queue_time_s.labels(model).observe(queued_s)
        if output.finish_reason is not None:
            metrics.requests_finished.labels(model, outcome).inc()
        else:
            metrics.requests_failed.labels(model, outcome).inc()
        of_request = stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_generated_tokens
        tenant = self._label(caller.tenant or NO_TENANT)
        self.used[tenant] = self.used.get(tenant, Used()).plus(Used(0, *of_request))
        if caller.tenant:
            self._count_tenant(self._label(caller.tenant), outcome, stats)

    def _count_tenant(self, tenant: str, outcome: str, stats: RequestStats) -> None:
        metrics = self._tenants
        metrics.requests.labels(tenant, outcome).inc()
        metrics.prompt_tokens.labels(tenant).inc(stats.num_prompt_tokens)
        metrics.prompt_tokens_cached.labels(tenant).inc(stats.num_cached_tokens)
        metrics.generation_tokens.labels(tenant).inc(stats.num_generated_tokens)


def _caller_keys(caller: Caller) -> dict[str, str]:
    """The caller's part of a log line; nothing without API keys."""
    return {"api_key": caller.key, "tenant": caller.tenant} if caller.tenant else {}
