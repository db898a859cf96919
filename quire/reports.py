"""Reports about a deployment from the client library, as frozen dataclasses without protobuf."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

WorkerState = Literal["unknown", "starting", "serving", "draining", "fenced"]


@dataclass(frozen=True, slots=True)
class Model:
    """A model that a gateway serves."""

    id: str
    max_model_len: int
    """The longest prompt + generation, in tokens: `context`, or less if the pools are smaller."""
    block_size: int
    dtype: str
    """The dtype of the weights, or their kind if linears compute quantized: int8, int4-32 ..."""
    context: int = 0
    """The longest prompt + generation of the model itself, in tokens."""
    parent: str = ""
    """The model of an adapter; empty if this is no adapter."""


@dataclass(frozen=True, slots=True)
class Pool:
    """The block counts of one pool: num_free + num_cached + num_held == num_blocks (law 1).

    Law 1 does not hold while the pool is `recovering`: Redis lost its ledger, and the workers in
    `missing_worker_ids` have not yet reported the blocks that they hold.
    """

    pool_id: str
    model: str
    fingerprint: str
    block_size: int
    block_bytes: int
    num_blocks: int
    num_free: int
    num_cached: int
    num_held: int
    num_holders: int
    num_waiters: int
    worker_ids: tuple[str, ...]
    num_prefix_queries: int
    num_prefix_hits: int
    recovering: bool = False
    missing_worker_ids: tuple[str, ...] = ()
    num_retained: int = 0
    """The prefix blocks that clients retain, cached or not."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker in the registry, with its load and measurements of its steps in the last seconds."""

    worker_id: str
    role: str
    address: str
    pool_id: str
    model: str
    state: WorkerState
    num_running: int
    num_waiting: int
    num_free_slots: int
    """The sequences that a decode worker can still take."""
    num_pending_tokens: int
    engine: Mapping[str, str]
    """The worker's backend, instruction set or GPU, dtype and quantization."""
    started_unix_ms: int
    pid: int = 0
    """The process id on the worker's host; 0 while the worker is not in the registry."""
    busy_permille: int = 0
    """The share of the time in which the worker computed steps, in thousandths."""
    step_us: int = 0
    """The mean duration of a step."""
    tokens_per_s: int = 0
    """The tokens computed in a second of steps."""
    name: str = ""
    """The name for people, which stays when the worker starts again with another id, and when it
    takes the other role."""

    @property
    def is_idle(self) -> bool:
        """Whether the worker has no request, and computed none in the last seconds."""
        return not (
            self.num_running or self.num_waiting or self.num_pending_tokens or self.busy_permille
        )


@dataclass(frozen=True, slots=True)
class Scaled:
    """The result of `scale`: the worker counts once the workers in `starting` serve, those in
    `leaving` have left, and those in `changing` have their role."""

    num_prefill: int
    num_decode: int
    starting: tuple[str, ...]
    leaving: tuple[str, ...]
    failing: Mapping[str, str] = field(default_factory=dict)
    """The workers that do not start, with the last line that each wrote."""
    warning: str = ""
    """A remark on the numbers for the operator; usually empty."""
    changing: Mapping[str, str] = field(default_factory=dict)
    """The workers that take the other role, with that role."""


@dataclass(frozen=True, slots=True)
class Upgrade:
    """An upgrade of a run that is going on, or has ended."""

    steps: tuple[str, ...] = ()
    """The steps that are done, a sentence each."""
    is_running: bool = False
    failure: str = ""
    """Why it ended early; empty otherwise."""


@dataclass(frozen=True, slots=True)
class PoolAudit:
    """A recount of one pool."""

    pool_id: str
    num_blocks: int
    num_free: int
    num_cached: int
    num_held: int
    num_holders: int
    num_references: int
    ledger_checked: bool
    """False if the pool changed too often or recovers, so that only the counters were checked."""
    violations: tuple[str, ...]
    """The violations of laws, a sentence each; empty if every law holds."""
    recovering: bool = False
