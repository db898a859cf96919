"""All Prometheus metrics of Quire, by service.

A metric that vLLM has too has vLLM's name, with the prefix `quire:`. prometheus_client appends
`_total` to counters.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from blockstore.records import PoolStats
from blockstore.registry import Load

# Bucket bounds in seconds; _BATCH_TOKENS in tokens.
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20)
_INTER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.4, 0.75, 1, 2.5)
_LATENCY = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480)
_STEP = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_BATCH_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class GatewayMetrics:
    """Latencies, tokens and ends of requests at a gateway. All metrics but the two gauges have the
    label `model_name`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        model = ["model_name"]
        self.time_to_first_token_s = Histogram(
            "quire:time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            model,
            buckets=_TTFT,
            registry=registry,
        )
        self.inter_token_latency_s = Histogram(
            "quire:inter_token_latency_seconds",
            "Between two tokens of one sequence.",
            model,
            buckets=_INTER_TOKEN,
            registry=registry,
        )
        self.e2e_request_latency_s = Histogram(
            "quire:e2e_request_latency_seconds",
            "From a request's arrival to its end.",
            model,
            buckets=_LATENCY,
            registry=registry,
        )
        self.request_queue_time_s = Histogram(
            "quire:request_queue_time_seconds",
            "From a request's arrival until it is first sent to a worker.",
            model,
            buckets=_LATENCY,
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "quire:prompt_tokens", "Prompt tokens of admitted requests.", model, registry=registry
        )
        self.prompt_tokens_cached = Counter(
            "quire:prompt_tokens_cached",
            "Prompt tokens found in the prefix cache.",
            model,
            registry=registry,
        )
        self.generation_tokens = Counter(
            "quire:generation_tokens", "Tokens given to clients.", model, registry=registry
        )
        self.requests_finished = Counter(
            "quire:request_success",
            "Requests that ended with a finish reason.",
            [*model, "finished_reason"],
            registry=registry,
        )
        self.requests_failed = Counter(
            "quire:request_failure",
            "Requests that were refused or ended with an error, by its code, or were cancelled "
            "(`cancelled`).",
            [*model, "code"],
            registry=registry,
        )
        self.num_preemptions = Counter(
            "quire:num_preemptions", "Requests that gave way to others.", model, registry=registry
        )
        self.num_moves = Counter(
            "quire:num_moves",
            "Running requests that went on at another decode worker, with nothing computed again.",
            model,
            registry=registry,
        )
        self.num_requests_running = Gauge(
            "quire:num_requests_running", "Requests at a worker.", registry=registry
        )
        self.num_requests_waiting = Gauge(
            "quire:num_requests_waiting", "Requests in the gateway's queue.", registry=registry
        )


class WorkerMetrics:
    """Steps, tokens, preemptions and load of a worker. There are no labels, since a worker serves
    one model on one pool."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.step_s = Histogram(
            "quire:step_seconds", "Duration of one step.", buckets=_STEP, registry=registry
        )
        self.step_tokens = Histogram(
            "quire:iteration_tokens",
            "Tokens computed in one step.",
            buckets=_BATCH_TOKENS,
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "quire:prompt_tokens", "Prompt tokens computed.", registry=registry
        )
        self.prompt_tokens_cached = Counter(
            "quire:prompt_tokens_cached",
            "Prompt tokens found in the prefix cache.",
            registry=registry,
        )
        self.generation_tokens = Counter(
            "quire:generation_tokens", "Tokens sampled.", registry=registry
        )
        self.num_preemptions = Counter(
            "quire:num_preemptions", "Sequence groups that gave way to others.", registry=registry
        )
        self.num_broken = Counter(
            "quire:num_broken", "Sequences whose output was not finite.", registry=registry
        )
        self.swapped_out_blocks = Counter(
            "quire:swapped_out_blocks", "Blocks copied to the colder pool.", registry=registry
        )
        self.num_swaps_refused = Counter(
            "quire:num_swaps_refused",
            "Sequence groups that were computed again: the colder pool had no room for them.",
            registry=registry,
        )
        self.swapped_in_blocks = Counter(
            "quire:swapped_in_blocks", "Blocks copied back from the colder pool.", registry=registry
        )
        self.kv_corrupt = Counter(
            "quire:kv_corrupt",
            "Blocks that did not say what their hash promised.",
            registry=registry,
        )
        self._load = _LoadGauges(registry)

    def observe_load(self, load: Load) -> None:
        self._load.observe(load)


class _LoadGauges:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._running = Gauge(
            "quire:num_requests_running", "Sequence groups that run.", registry=registry
        )
        self._waiting = Gauge(
            "quire:num_requests_waiting", "Sequence groups that wait.", registry=registry
        )
        self._free_slots = Gauge(
            "quire:num_free_slots", "Sequences that can still be taken.", registry=registry
        )
        self._pending_tokens = Gauge(
            "quire:num_pending_tokens", "Prompt tokens still to compute.", registry=registry
        )

    def observe(self, load: Load) -> None:
        self._running.set(load.num_running)
        self._waiting.set(load.num_waiting)
        self._free_slots.set(load.num_free_slots)
        self._pending_tokens.set(load.num_pending_tokens)


class PoolMetrics:
    """The block manager's metrics: those of pools, with the labels `pool_id` and `model_name`, and
    without labels the counts of reaped, fenced and refused members."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ["pool_id", "model_name"]
        self._usage = Gauge(
            "quire:kv_cache_usage_perc", "Held blocks; 1 is all.", labels, registry=registry
        )
        self._blocks = Gauge(
            "quire:kv_cache_blocks", "Blocks by state.", [*labels, "state"], registry=registry
        )
        self._holders = Gauge(
            "quire:kv_cache_holders", "Holders of blocks.", labels, registry=registry
        )
        self._waiters = Gauge(
            "quire:kv_cache_waiters", "Requests that wait for blocks.", labels, registry=registry
        )
        self._queries = Counter(
            "quire:prefix_cache_queries", "Prefix blocks looked up.", labels, registry=registry
        )
        self._hits = Counter(
            "quire:prefix_cache_hits", "Prefix blocks found.", labels, registry=registry
        )
        self.audit_violations = Counter(
            "quire:audit_violations", "Broken laws that audits found.", labels, registry=registry
        )
        self.workers_reaped = Counter(
            "quire:workers_reaped", "Dead workers whose blocks were released.", registry=registry
        )
        self.workers_fenced = Counter(
            "quire:workers_fenced", "Workers that were alive but stuck.", registry=registry
        )
        self.members_refused = Counter(
            "quire:members_refused",
            "Registry entries without this deployment's signature.",
            registry=registry,
        )
        self._seen: dict[str, tuple[int, int]] = {}

    def observe(self, stats: PoolStats) -> None:
        """Export a pool's statistics; counters grow by the difference from the last call."""
        labels = (stats.spec.pool_id, stats.spec.model)
        self._usage.labels(*labels).set(stats.num_held / stats.spec.num_blocks)
        for state in ("free", "cached", "held"):
            self._blocks.labels(*labels, state).set(getattr(stats, f"num_{state}"))
        self._holders.labels(*labels).set(stats.num_holders)
        self._waiters.labels(*labels).set(stats.num_waiters)
        queries, hits = self._seen.get(stats.spec.pool_id, (0, 0))
        self._queries.labels(*labels).inc(max(0, stats.num_prefix_queries - queries))
        self._hits.labels(*labels).inc(max(0, stats.num_prefix_hits - hits))
        self._seen[stats.spec.pool_id] = (stats.num_prefix_queries, stats.num_prefix_hits)

    def forget(self, pool_id: str, model: str) -> None:
        """Remove the gauges of a pool that no longer exists."""
        for gauge in (self._usage, self._holders, self._waiters):
            gauge.remove(pool_id, model)
        self._blocks.remove_by_labels({"pool_id": pool_id})
        self._seen.pop(pool_id, None)
