"""Loads the model that the settings name, and derives the pool's layout and the worker's limits."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import kvops
from kvops.native import Lane
from services.engine.device.gpu_memory import CudaMeter, profile
from services.engine.device.opening import open_device
from services.engine.device.steps import attention_shape
from services.engine.fingerprint import fingerprint
from services.engine.models import Model, load_model
from services.engine.models.decoder import ComposedModel
from services.engine.pool import DTYPES
from services.engine.ranks.rank import ShardPlan
from services.engine.runner import Runner
from services.engine.weights.checkpoint import read_score_head
from services.engine.weights.packed_file import Progress
from services.engine.weights.placement import SharedWeights
from services.model.checkpoint.check import check_format
from services.model.checkpoint.reading import read_model_config
from services.model.checkpoint.weights import weight_files
from services.model.config.model_config import ModelConfig
from services.model.gguf.config import served_bytes
from services.model.gguf.file import GgufFile, gguf_file
from services.model.text.tokenizer import tokenizer_file
from services.pool.allotment import LOOK_AHEAD
from services.pool.layout import PoolLayout
from services.pool.sizing import MemoryPlan
from services.runtime.errors import StartupError
from services.runtime.logging import get_logger
from services.worker.config import WorkerSettings
from services.worker.cpu.place import Place
from services.worker.drafting import DraftPlan, LoadedDraft, load_draft, plan_draft
from services.worker.kernels import (
    chosen_backend,
    computed_dtype,
    open_backend,
    stored_kv_dtype,
)
from services.worker.limits import PARK_WINDOW_S, Limits
from services.worker.pool_memory import FileMemory, GpuMemory, PoolMemory
from services.worker.ranks.processes import Ranks, end_worker
from services.worker.weights_cache import usable_cache

_DRAFT_OVERHEAD_BYTES = 512 << 20
"""An allowance for what a draft model takes on a GPU beside weights and KV: its graphs, and the
workspace of its attention. Its activations take the memory of the target's."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: Model
    layout: PoolLayout
    limits: Limits
    plan: MemoryPlan
    swap_bytes: int | None
    ops: kvops.Backend
    memory: PoolMemory
    engine: dict[str, str]
    ranks: Ranks | None = None
    weights: SharedWeights | None = None
    draft: LoadedDraft | None = None


def load(
    settings: WorkerSettings,
    progress: Progress,
    place: Place | None = None,
    on_rank_end: Callable[[int, int], None] = end_worker,
) -> LoadedModel:
    """Load the model. Blocks the thread until the weights are read, and calls `progress` several
    times a second, which may raise to stop the load. Raises StartupError; if it raises, ranks that
    were started have ended.

    `place` is None if the worker divides no CPUs with others; `on_rank_end` is as in `Ranks`.
    """
    loading = _Load(settings, progress, place)
    try:
        return loading.load(on_rank_end)
    except BaseException:
        if loading.ranks is not None:
            loading.ranks.close()
        raise


class _Load:
    """The decisions of one load, in the order of `__init__`."""

    def __init__(self, settings: WorkerSettings, progress: Progress, place: Place | None) -> None:
        cache = usable_cache(settings.weights_cache)
        self.settings = settings = settings.model_copy(update={"weights_cache": cache})
        self.progress, self.place = progress, place
        self.device = open_device(settings.devices[0])
        check_format(settings.model)
        self.config = read_model_config(settings.model).for_context(settings.max_model_len)
        settings.check_ranks(self.config)
        settings.check_speculation()
        tokenizer_file(settings.model)  # raises without one: gateways would not serve the model
        self.is_dequantized = settings.is_dequantized(self.config)
        self.dtype_name = computed_dtype(settings, self.config)
        if self.is_dequantized:
            log.info("weights_dequantized", model=settings.served_name, dtype=self.dtype_name)
        self.dtype = DTYPES[self.dtype_name]
        self.kv_dtype = stored_kv_dtype(settings, self.config)
        self.backend = open_backend(settings, self.config, self.device)
        if self.backend.native is not None:
            self.backend.native.assign([Lane()] * self._num_threads)
        self.cache = place.weights_cache(cache) if place else cache
        self.shared = self._shared_weights()
        self.ranks: Ranks | None = None

    def load(self, on_rank_end: Callable[[int, int], None]) -> LoadedModel:
        settings, config, place, backend = self.settings, self.config, self.place, self.backend
        draft_plan = plan_draft(settings, config, self.kv_dtype)
        with place.weights.interleaved() if place else nullcontext():
            model = self._model(on_rank_end)
        kinds = {
            "quantize": settings.computed_kind(config) or "none",
            "kv_dtype": self.kv_dtype,
            "tensor_parallel_size": str(settings.tensor_parallel_size),
        }
        if not settings.sums_in_order:
            kinds["sums"] = "all-reduce"
        numerics = {**backend.numerics(self.dtype), **kinds}
        block_size = settings.block_size
        layout = PoolLayout(
            model=settings.served_name,
            fingerprint=fingerprint(config, model.weights_digest, self.dtype, block_size, numerics),
            num_layers=config.num_layers,
            num_kv_heads=model.config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=self.kv_dtype,
            block_size=block_size,
            tensor_parallel_size=settings.tensor_parallel_size,
        )
        plan = self._plan(draft_plan)
        memory: PoolMemory = FileMemory()
        if (driver := self.device.driver) is not None:
            plan = replace(plan, pool_bytes=self._pool_bytes_on_gpu(model, layout, draft_plan))
            memory = GpuMemory(driver, ",".join(settings.devices), self.ranks)
        devices = ",".join(dict.fromkeys(settings.devices))
        draft = None  # loaded last: the plan of a GPU's memory counts it apart
        if draft_plan is not None and settings.role == "decode":
            with place.weights.interleaved() if place else nullcontext():
                draft = self._draft(draft_plan)
        return LoadedModel(
            model,
            layout,
            self._limits(),
            plan,
            swap_bytes=settings.swap_bytes,
            ops=backend,
            memory=memory,
            engine={**backend.describe(self.dtype), **kinds, "device": devices},
            ranks=self.ranks,
            weights=self.shared,
            draft=draft,
        )

    def _model(self, on_rank_end: Callable[[int, int], None]) -> Model:
        """The model in this process, or divided among ranks, which are started."""
        settings, dtype, backend = self.settings, self.dtype, self.backend
        if settings.tensor_parallel_size > 1:
            logs = settings.log_level, settings.log_format
            self.ranks = Ranks(settings.tensor_parallel_size, *logs, on_rank_end)
            plan = ShardPlan(
                model=settings.model.resolve(),
                dtype=dtype,
                backend=backend.name,
                isa=backend.native.isa if backend.native else None,
                devices=settings.devices,
                num_threads=self._num_threads,
                timeout_s=settings.step_limit_s,
                context=settings.max_model_len,
                block_size=settings.block_size,
                kv_dtype=DTYPES[self.kv_dtype],
                sums_in_order=settings.sums_in_order,
                quantize=settings.kind_to_make,
                dequantize=self.is_dequantized,
                keeper=settings.pool_root if self.shared else None,
            )
            return self.ranks.load(plan, backend, self.shared, self.progress)
        return load_model(
            settings.model,
            dtype,
            backend,
            device=str(self.device.torch),
            quantize=settings.kind_to_make,
            dequantize=self.is_dequantized,
            cache=self.cache,
            context=settings.max_model_len,
            progress=self.progress,
            shared=self.shared,
        )

    def _draft(self, plan: DraftPlan) -> LoadedDraft:
        """The draft model. On a GPU it has a backend of its own, which plans its attention."""
        settings, backend = self.settings, self.backend
        shape = attention_shape(
            plan.config, settings.block_size, self.dtype, DTYPES[plan.layout.dtype]
        )
        try:
            if backend.has_sampler:
                backend = chosen_backend(settings, shape)
            backend.check_attention(shape)
        except (kvops.BackendUnavailable, ValueError) as error:
            raise StartupError(f"the draft model {plan.directory}: {error}") from error
        return load_draft(
            settings,
            plan,
            backend,
            self.dtype_name,
            str(self.device.torch),
            self.cache,
            self.progress,
            runs_ahead=backend.has_sampler and not (backend.needs_plan or self.backend.needs_plan),
        )

    def _shared_weights(self) -> SharedWeights | None:
        """The weights of rank 0; None if the weights are in a file of the host."""
        settings, driver = self.settings, self.device.driver
        if driver is None or (self.backend.native and settings.tensor_parallel_size == 1):
            return None
        where = driver, settings.pool_root, self.progress
        if self.device.torch.type != "cuda" or settings.pool_bytes is not None:
            return SharedWeights(*where)
        return SharedWeights(*where, CudaMeter(self.device.torch, driver.uuid).other)

    @property
    def _num_threads(self) -> int:
        """The threads of each rank. Ranks divide the CPUs evenly, and lend none to other
        workers."""
        settings, size = self.settings, self.settings.tensor_parallel_size
        if settings.threads:
            return settings.threads
        num_cpus = self.place.num_cpus if self.place else len(settings.divided_cpus)
        return num_cpus if size == 1 else max(1, num_cpus // (size * settings.num_expected_workers))

    def _pool_bytes_on_gpu(self, model: Model, layout: PoolLayout, draft: DraftPlan | None) -> int:
        """The memory of all ranks. Each has the same blocks, so the smallest GPU decides. A draft
        model counts for all workers, since a prefill worker may take the decode role."""
        settings, device, ranks = self.settings, self.device, self.ranks
        if settings.pool_bytes is not None:
            return settings.pool_bytes
        if device.driver is None or device.torch.type != "cuda":
            raise StartupError(f"set pool_memory: {device.name} has no size of its own")
        draft_bytes = 0
        if draft is not None:
            weight_bytes = self._weight_bytes(draft.directory, draft.config)
            draft_bytes = weight_bytes + draft.kv_bytes + _DRAFT_OVERHEAD_BYTES
        measure = partial(
            profile,
            CudaMeter(device.torch, device.driver.uuid),
            model.device,
            lambda kv: new_runner(model, kv, layout.block_size, self.backend, ranks),
            layout,
            num_tokens=settings.num_batched_tokens,
            num_rows=settings.num_decode_rows,
            num_workers=settings.num_expected_workers,
            utilization=settings.gpu_memory_utilization,
            shared=self.shared,
            graph_rows=0 if settings.enforce_eager else settings.num_decode_rows,
            draft_bytes=draft_bytes,
            max_lora_rank=settings.graph_lora_rank,
        )
        plan = ranks.measure(layout, measure) if ranks else measure()
        log.info("gpu_memory_planned", device=settings.device, **plan.fields(layout.block_bytes))
        return settings.tensor_parallel_size * plan.pool

    def _limits(self) -> Limits:
        settings, config = self.settings, self.config
        speculative = settings.speculative_config
        return Limits(
            max_num_seqs=settings.num_seqs,
            max_num_batched_tokens=settings.num_batched_tokens,
            max_model_len=settings.context(config),
            vocab_size=config.vocab_size,
            eos_token_ids=frozenset(config.eos_token_ids),
            look_ahead=LOOK_AHEAD + (speculative.num_speculative_tokens if speculative else 0),
            score_head=read_score_head(settings.model, config),
            park_window_s=PARK_WINDOW_S,
        )

    def _plan(self, draft: DraftPlan | None) -> MemoryPlan:
        """Estimate the memory of weights and activations. Activations: twice those at the widest
        point of a layer, at each rank, and the logits of a full batch. A draft model has smaller
        ones, before the step's; its KV counts for all workers, since a prefill worker does not know
        how many others decode."""
        settings, config = self.settings, self.config
        num_heads = config.num_heads + 2 * config.num_kv_heads
        width = config.hidden_size + max(2 * config.intermediate_size, num_heads * config.head_dim)
        num_values = settings.tensor_parallel_size * 2 * settings.num_batched_tokens * width
        num_values += settings.num_seqs * config.vocab_size
        weight_bytes = self._weight_bytes(settings.model, config)
        if draft is not None:
            weight_bytes += self._weight_bytes(draft.directory, draft.config)
        kv_bytes = draft.kv_bytes if draft else 0
        return MemoryPlan(
            pool_bytes=settings.pool_bytes,
            num_expected_workers=settings.num_expected_workers,
            weight_bytes=weight_bytes,
            activation_bytes=num_values * torch.float32.itemsize + kv_bytes,
            arena=self.place.arena if self.place else None,
        )

    def _weight_bytes(self, directory: Path, config: ModelConfig) -> int:
        dequantized, itemsize = self.settings.is_dequantized(config), self.dtype.itemsize
        if (gguf := gguf_file(directory)) is not None:
            return served_bytes(GgufFile.read(gguf), itemsize, dequantized)
        file_bytes = sum(path.stat().st_size for path in weight_files(directory))
        return int(file_bytes * itemsize / _stored_bytes(config, self.dtype, dequantized))


def new_runner(
    model: Model, kv: Tensor, block_size: int, ops: kvops.Backend, ranks: Ranks | None = None
) -> Runner:
    """The runner of one process, or of all ranks."""
    if ranks is None:
        return Runner(model, kv, block_size, ops)
    assert isinstance(model, ComposedModel)
    return Runner(model, kv, block_size, ops, ranks.steps(model, kv, block_size, ops))


def _stored_bytes(config: ModelConfig, dtype: torch.dtype, dequantized: bool) -> float:
    """The bytes of a weight in the files. Linears that keep their quantization keep their size."""
    if config.quantization is None:
        return int(getattr(torch, config.dtype).itemsize)
    kind = config.quantization.kind
    if kind is None or dequantized:
        return 0.5 if kind and (kind.startswith("int4") or kind == "mxfp4") else 1
    return dtype.itemsize
