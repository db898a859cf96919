"""The draft model of a decode worker: its weights, and the memory of its KV."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import kvops
from quire.sizes import parse_size
from services.engine.models import Model, load_model
from services.engine.pool import DTYPES, KVPool
from services.engine.runner import Runner
from services.engine.speculation.draft_model import DraftModel, Launch
from services.engine.speculation.ngram import NgramDrafter
from services.engine.speculation.speculation import Drafter, Speculation
from services.engine.weights.packed_file import Progress
from services.model.config.model_config import ModelConfig
from services.pool.layout import KVDtype, PoolLayout
from services.pool.sizing import MIN_BLOCKS, format_size
from services.runtime.errors import StartupError
from services.runtime.logging import get_logger
from services.worker.config import WorkerSettings

_NUM_WARM_UP_TOKENS = 32

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """A draft model that can be loaded."""

    directory: Path
    config: ModelConfig
    layout: PoolLayout
    num_blocks: int
    """The number of blocks for its KV in each decode worker."""
    context: int
    """The most positions of a sequence that gets drafts."""

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.layout.block_bytes


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    plan: DraftPlan
    model: Model
    ops: kvops.Backend
    runs_ahead: bool
    """Whether steps run ahead of drafts: a device draws, and the host plans attention of neither
    model."""

    def drafter(
        self,
        target: Runner,
        launch_on: Callable[[Runner], Launch],
        max_rows: int,
        *,
        has_graphs: bool,
    ) -> DraftModel:
        """A drafter with KV of its own. `launch_on` gives the worker's device to its runner."""
        layout, num_blocks = self.plan.layout, self.plan.num_blocks
        kv = KVPool.private(layout, num_blocks, str(self.model.device)).kv
        runner = Runner(self.model, kv, layout.block_size, self.ops, table=target.table)
        runner.warm_up(_NUM_WARM_UP_TOKENS, max_rows)
        if has_graphs:
            runner.capture_graphs(max_rows, 0)
        launch = launch_on(runner)
        return DraftModel(
            lambda rows: launch(rows).result(),
            num_blocks,
            layout.block_size,
            context=self.plan.context,
            launch=None if runner.computes_at_launch else launch,
            runs_ahead=self.runs_ahead,
        )


def plan_draft(
    settings: WorkerSettings, config: ModelConfig, kv_dtype: KVDtype
) -> DraftPlan | None:
    """Plan the draft model; None without one. Raises StartupError if it does not fit."""
    speculative, found = settings.speculative_config, settings.check_draft(config)
    if speculative is None or speculative.model is None or found is None:
        return None
    layout = PoolLayout(
        model=speculative.model.name,
        fingerprint="",  # no other process sees these blocks
        num_layers=found.num_layers,
        num_kv_heads=found.num_kv_heads,
        head_dim=found.head_dim,
        dtype=kv_dtype,
        block_size=settings.block_size,
    )
    context = min(settings.context(config), found.max_position_embeddings)
    most = settings.num_seqs * -(-context // settings.block_size)
    num_bytes = parse_size(speculative.draft_kv_memory)
    num_blocks = min(num_bytes // layout.block_bytes, most)
    if num_blocks < MIN_BLOCKS:
        raise StartupError(
            f"draft_kv_memory {format_size(num_bytes)} holds {num_blocks} blocks of "
            f"{format_size(layout.block_bytes)}: the draft model needs at least {MIN_BLOCKS}"
        )
    return DraftPlan(speculative.model, found, layout, num_blocks, context)


def load_draft(
    settings: WorkerSettings,
    plan: DraftPlan,
    ops: kvops.Backend,
    dtype: KVDtype,
    device: str,
    cache: Path | None,
    progress: Progress,
    *,
    runs_ahead: bool,
) -> LoadedDraft:
    """Load the weights, to compute as the target does: in `dtype`, quantized as the settings say
    unless the checkpoint is quantized already. Raises StartupError."""
    model = load_model(
        plan.directory,
        DTYPES[dtype],
        ops,
        device=device,
        quantize=None if plan.config.quantization else settings.kind_to_make,
        dequantize=settings.is_dequantized(plan.config),
        cache=cache,
        context=plan.context,
        progress=progress,
    )
    log.info(
        "draft_model_loaded",
        model=plan.layout.model,
        kv_bytes=plan.kv_bytes,
        num_kv_tokens=plan.num_blocks * plan.layout.block_size,
        max_model_len=plan.context,
        runs_ahead=runs_ahead,
    )
    return LoadedDraft(plan, model, ops, runs_ahead)


def speculation(
    settings: WorkerSettings,
    draft: LoadedDraft | None,
    target: Runner,
    launch_on: Callable[[Runner], Launch],
) -> Speculation | None:
    """The speculation of a worker while it decodes; None if its sequences get no drafts."""
    config = settings.speculative_config
    if config is None or (settings.drafts_with_model and draft is None):
        return None
    drafter: Drafter = NgramDrafter(*config.ngram_sizes)
    if draft is not None:
        has_graphs = settings.is_on_gpu and not settings.enforce_eager
        drafter = draft.drafter(target, launch_on, settings.num_decode_rows, has_graphs=has_graphs)
    most_tokens = settings.num_decode_rows if settings.is_on_gpu else None
    return Speculation(drafter, config.num_speculative_tokens, most_tokens=most_tokens)
