"""All Prometheus metrics of Quire, by service.

A metric that vLLM has too has vLLM's name, with the prefix `quire:`. prometheus_client appends
`_total` to counters.
"""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from blockstore.records import PoolStats
from blockstore.registry import Load

# Bucket bounds in seconds; _BATCH_TOKENS in tokens.
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20)
_INTER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.4, 0.75, 1, 2.5)
_LATENCY = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480)
_QUIET = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_STEP = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_PULL = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_BATCH_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


MAX_TENANT_LABELS = 100
"""Tenants with metrics of their own at one service: clients must not make series without end."""
OTHER_TENANTS = "~other"
"""The label of all further tenants. No tenant has this name."""


class TenantLabels:
    """Gives the first `MAX_TENANT_LABELS` tenants a label of their own."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def of(self, tenant: str) -> str:
        if len(self._known) < MAX_TENANT_LABELS:
            self._known.add(tenant)
        return tenant if tenant in self._known else OTHER_TENANTS


class _Make:
    """Makes metrics with the labels `labels`, and further ones."""

    def __init__(self, registry: CollectorRegistry, *labels: str) -> None:
        self._registry, self._labels = registry, labels

    def counter(self, name: str, text: str, *more: str) -> Counter:
        return Counter(name, text, (*self._labels, *more), registry=self._registry)

    def gauge(self, name: str, text: str, *more: str) -> Gauge:
        return Gauge(name, text, (*self._labels, *more), registry=self._registry)

    def histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, self._labels, buckets=buckets, registry=self._registry)


class GatewayMetrics:
    """Latencies, tokens and ends of requests at a gateway. All metrics but the two gauges have the
    label `model_name`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        make, alone = _Make(registry, "model_name"), _Make(registry)
        self.time_to_first_token_s = make.histogram(
            "quire:time_to_first_token_seconds",
            "Time from a request's arrival to its first token.",
            _TTFT,
        )
        self.inter_token_latency_s = make.histogram(
            "quire:inter_token_latency_seconds",
            "Time between two tokens of one sequence.",
            _INTER_TOKEN,
        )
        self.e2e_request_latency_s = make.histogram(
            "quire:e2e_request_latency_seconds",
            "Time from a request's arrival to its end.",
            _LATENCY,
        )
        self.request_queue_time_s = make.histogram(
            "quire:request_queue_time_seconds",
            "Time from a request's arrival until it is first sent to a worker.",
            _LATENCY,
        )
        self.prompt_tokens = make.counter(
            "quire:prompt_tokens", "Prompt tokens of admitted requests."
        )
        self.prompt_tokens_cached = make.counter(
            "quire:prompt_tokens_cached", "Prompt tokens found in the prefix cache."
        )
        self.generation_tokens = make.counter("quire:generation_tokens", "Tokens sent to clients.")
        self.requests_finished = make.counter(
            "quire:request_success", "Requests that ended with a finish reason.", "finished_reason"
        )
        self.requests_failed = make.counter(
            "quire:request_failure",
            "Requests that were refused, ended with an error, or were cancelled, by error code "
            "(`cancelled`).",
            "code",
        )
        self.num_preemptions = make.counter("quire:num_preemptions", "Preemptions of requests.")
        self.num_moves = make.counter(
            "quire:num_moves",
            "Moves of running requests to another decode worker, without recomputation.",
        )
        self.recommended_workers = make.gauge(
            "quire:recommended_workers", "Workers that the load needs.", "role"
        )
        self.num_requests_running = alone.gauge(
            "quire:num_requests_running", "Requests at a worker."
        )
        self.num_requests_waiting = alone.gauge(
            "quire:num_requests_waiting", "Requests in the gateway's queue."
        )


class TenantMetrics:
    """Requests and tokens of each tenant, where gateways have API keys."""

    def __init__(self, registry: CollectorRegistry) -> None:
        make = _Make(registry, "tenant")
        self.requests = make.counter(
            "quire:tenant_requests",
            "Requests by tenant and outcome: a finish reason, an error code, or `cancelled`.",
            "outcome",
        )
        self.prompt_tokens = make.counter(
            "quire:tenant_prompt_tokens", "Prompt tokens of admitted requests."
        )
        self.prompt_tokens_cached = make.counter(
            "quire:tenant_prompt_tokens_cached", "Prompt tokens found in the prefix cache."
        )
        self.generation_tokens = make.counter(
            "quire:tenant_generation_tokens", "Tokens of requests that have ended."
        )
        self.time_to_first_token_s = make.histogram(
            "quire:tenant_time_to_first_token_seconds",
            "Time from a request's arrival to its first token.",
            _TTFT,
        )


class KeyringMetrics:
    """The API keys of a gateway."""

    def __init__(self, registry: CollectorRegistry) -> None:
        make = _Make(registry)
        self.num_keys = make.gauge("quire:api_keys", "API keys that are valid.")
        self.reloads = make.counter(
            "quire:api_key_reloads",
            "Changed key files that the gateway read (`ok`) or refused (`refused`).",
            "outcome",
        )


class WorkerMetrics:
    """Steps, tokens, preemptions and load of a worker. There are no labels, since a worker serves
    one model on one pool."""

    def __init__(self, registry: CollectorRegistry) -> None:
        make = _Make(registry)
        self.step_s = make.histogram("quire:step_seconds", "Duration of one step.", _STEP)
        self.step_tokens = make.histogram(
            "quire:iteration_tokens", "Tokens computed in one step.", _BATCH_TOKENS
        )
        self.prompt_tokens = make.counter("quire:prompt_tokens", "Prompt tokens computed.")
        self.prompt_tokens_cached = make.counter(
            "quire:prompt_tokens_cached", "Prompt tokens found in the prefix cache."
        )
        self.generation_tokens = make.counter("quire:generation_tokens", "Tokens sampled.")
        self.num_drafts = make.counter(
            "quire:spec_decode_num_drafts", "Rows of steps that verified drafts."
        )
        self.num_draft_tokens = make.counter(
            "quire:spec_decode_num_draft_tokens", "Drafts that steps verified."
        )
        self.num_accepted_tokens = make.counter(
            "quire:spec_decode_num_accepted_tokens", "Drafts that were accepted."
        )
        self.num_preemptions = make.counter(
            "quire:num_preemptions", "Preemptions of sequence groups."
        )
        self.num_broken = make.counter("quire:num_broken", "Sequences whose output was not finite.")
        self.swapped_out_blocks = make.counter(
            "quire:swapped_out_blocks", "Blocks copied to the swap pool."
        )
        self.num_swaps_refused = make.counter(
            "quire:num_swaps_refused",
            "Sequence groups that were recomputed because the swap pool had no room.",
        )
        self.swapped_in_blocks = make.counter(
            "quire:swapped_in_blocks", "Blocks copied back from the swap pool."
        )
        self.file_cache_queries = make.counter(
            "quire:file_cache_queries", "Blocks of prompts that were not in the pool."
        )
        self.file_cache_hits = make.counter(
            "quire:file_cache_hits", "Blocks that were read from files."
        )
        self.file_cache_written_blocks = make.counter(
            "quire:file_cache_written_blocks", "Blocks that were written to files."
        )
        self.file_cache_errors = make.counter(
            "quire:file_cache_errors", "Files that were damaged, or could not be written."
        )
        self.kv_corrupt = make.counter(
            "quire:kv_corrupt", "Blocks whose stamp did not match the tokens of their hash."
        )
        self._running = make.gauge("quire:num_requests_running", "Running sequence groups.")
        self._waiting = make.gauge("quire:num_requests_waiting", "Waiting sequence groups.")
        self._free_slots = make.gauge(
            "quire:num_free_slots", "Sequences that the worker can still take."
        )
        self._pending_tokens = make.gauge(
            "quire:num_pending_tokens", "Prompt tokens that are still to be computed."
        )

    def observe_load(self, load: Load) -> None:
        self._running.set(load.num_running)
        self._waiting.set(load.num_waiting)
        self._free_slots.set(load.num_free_slots)
        self._pending_tokens.set(load.num_pending_tokens)


class PoolMetrics:
    """The block manager's metrics: of each pool, with the labels `pool_id` and `model_name`, and
    without labels the counts of reaped, fenced and refused members."""

    def __init__(self, registry: CollectorRegistry) -> None:
        make, alone = _Make(registry, "pool_id", "model_name"), _Make(registry)
        self._usage = make.gauge(
            "quire:kv_cache_usage_perc", "Held blocks as a share of all blocks, 0 to 1."
        )
        self._blocks = make.gauge("quire:kv_cache_blocks", "Blocks by state.", "state")
        self._holders = make.gauge("quire:kv_cache_holders", "Holders of blocks.")
        self._waiters = make.gauge("quire:kv_cache_waiters", "Requests that wait for blocks.")
        self._queries = make.counter("quire:prefix_cache_queries", "Prefix blocks looked up.")
        self._hits = make.counter("quire:prefix_cache_hits", "Prefix blocks found.")
        self.audit_violations = make.counter(
            "quire:audit_violations", "Broken laws that audits found."
        )
        self.workers_reaped = alone.counter(
            "quire:workers_reaped", "Dead workers whose blocks were released."
        )
        self.worker_quiet_s = alone.histogram(
            "quire:worker_quiet_seconds",
            "Time from the dropped lock of a dead worker until it could write no more.",
            _QUIET,
        )
        self.workers_fenced = alone.counter(
            "quire:workers_fenced", "Workers that were alive but stuck."
        )
        self.members_refused = alone.counter(
            "quire:members_refused", "Registry entries without this deployment's signature."
        )
        self._block_seconds = make.counter(
            "quire:tenant_kv_cache_block_seconds", "Blocks of a tenant times seconds.", "tenant"
        )
        self._seen: dict[str, tuple[int, int]] = {}
        self._seen_ms: dict[tuple[str, str], int] = {}
        self._tenants = TenantLabels()

    def observe(self, stats: PoolStats) -> None:
        """Export a pool's statistics; counters grow by the difference from the last call."""
        labels = (stats.spec.pool_id, stats.spec.model)
        self._usage.labels(*labels).set(stats.num_held / stats.spec.num_blocks)
        for state in ("free", "cached", "held"):
            self._blocks.labels(*labels, state).set(getattr(stats, f"num_{state}"))
        self._holders.labels(*labels).set(stats.num_holders)
        self._waiters.labels(*labels).set(stats.num_waiters)
        self.audit_violations.labels(*labels)  # 0 from the start: an alert needs the first increase
        queries, hits = self._seen.get(stats.spec.pool_id, (0, 0))
        self._queries.labels(*labels).inc(max(0, stats.num_prefix_queries - queries))
        self._hits.labels(*labels).inc(max(0, stats.num_prefix_hits - hits))
        self._seen[stats.spec.pool_id] = (stats.num_prefix_queries, stats.num_prefix_hits)
        for share in stats.shares:
            key = stats.spec.pool_id, share.tenant
            used_ms = max(0, share.block_ms - self._seen_ms.get(key, 0))
            self._block_seconds.labels(*labels, self._tenants.of(share.tenant)).inc(used_ms / 1000)
            self._seen_ms[key] = share.block_ms

    def forget(self, pool_id: str, model: str) -> None:
        """Remove the gauges of a pool that no longer exists."""
        for gauge in (self._usage, self._holders, self._waiters):
            gauge.remove(pool_id, model)
        self._blocks.remove_by_labels({"pool_id": pool_id})
        self._seen_ms = {key: ms for key, ms in self._seen_ms.items() if key[0] != pool_id}
        self._seen.pop(pool_id, None)


class MoverMetrics:
    """The metrics of movers. `source` is the id of the pool that is read."""

    def __init__(self, registry: CollectorRegistry) -> None:
        make = _Make(registry, "source")
        self.pulls = make.counter(
            "quire:mover_pulls", "Pulls by outcome: done, or why not.", "outcome"
        )
        self.blocks = make.counter("quire:mover_pulled_blocks", "Blocks copied.")
        self.seconds = make.histogram(
            "quire:mover_pull_seconds", "Time of a pull that copied blocks.", _PULL
        )
        self.bandwidth = make.gauge("quire:mover_bandwidth_bytes_per_second", "As last measured.")
        self.slow = make.gauge(
            "quire:mover_slow_source",
            "1 if the bandwidth is below min_bandwidth: the transport may have chosen a slow way.",
        )

    def forget(self, source: str) -> None:
        """Remove the gauges of a pool that is gone."""
        for each in (self.bandwidth, self.slow):
            each.remove(source)
