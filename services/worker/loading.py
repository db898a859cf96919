"""Loads the model that the settings name, and derives the pool's layout and the worker's limits."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import kvops
from kvops.native import Lane
from services.common.checkpoint.check import check_format
from services.common.checkpoint.shards import Shard
from services.common.checkpoint.weights import weight_files
from services.common.errors import StartupError
from services.common.gguf.config import served_bytes
from services.common.gguf.file import GgufFile, gguf_file
from services.common.pool.allotment import LOOK_AHEAD
from services.common.pool.layout import Dtype, KVDtype, PoolLayout
from services.common.pool.sizing import MemoryPlan
from services.common.runtime.logging import get_logger
from services.common.text.model_config import ModelConfig
from services.common.text.tokenizer import tokenizer_file
from services.engine.device.gpu_memory import CudaMeter, profile
from services.engine.device.opening import OpenDevice, open_device
from services.engine.device.steps import attention_shape
from services.engine.fingerprint import fingerprint
from services.engine.models import Model, load_model
from services.engine.pool import DTYPES
from services.engine.ranks.lead import LeadModel, LeadRunner
from services.engine.runner import Runner
from services.engine.weights.packed_file import Progress
from services.engine.weights.placement import SharedWeights
from services.worker.config import WorkerSettings
from services.worker.cpu.place import Place
from services.worker.drafting import DraftPlan, LoadedDraft, load_draft, plan_draft
from services.worker.limits import PARK_WINDOW_S, Limits
from services.worker.pool_memory import FileMemory, GpuMemory, PoolMemory
from services.worker.ranks.processes import Ranks
from services.worker.weights_cache import usable_cache

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


def load(settings: WorkerSettings, progress: Progress, place: Place | None = None) -> LoadedModel:
    """Load the model. Blocks the thread until the weights are read, and calls `progress` several
    times a second, which may raise to stop the load. Raises StartupError.

    `place`: None if the worker divides no CPUs with others.
    """
    cache = usable_cache(settings.weights_cache)
    settings = settings.model_copy(update={"weights_cache": cache})
    devices = settings.devices
    device = open_device(devices[0])
    check_format(settings.model)
    config = ModelConfig.from_directory(settings.model).for_context(settings.max_model_len)
    settings.check_ranks(config)
    settings.check_speculation()
    tokenizer_file(settings.model)  # raises without a tokenizer: gateways would not serve the model
    name = _dtype(settings, config)
    if settings.is_dequantized(config):
        log.info("weights_dequantized", model=settings.served_name, dtype=name)
    dtype, kv_dtype = DTYPES[name], name if settings.kv_dtype == "auto" else settings.kv_dtype
    backend = _backend(settings, device, config, dtype, kv_dtype)
    num_threads = _num_threads(settings, place)
    if backend.native is not None:
        backend.native.assign([Lane()] * num_threads)
    shared = _shared_weights(settings, device, backend, progress)
    draft, draft_plan = None, plan_draft(settings, config, kv_dtype)
    with place.weights.interleaved() if place else nullcontext():
        model, ranks = _load(
            *(settings, config, device, backend, dtype, kv_dtype),
            *(place, num_threads, shared, progress),
        )
        if draft_plan is not None and settings.service == "decode":
            cache = _cache(settings, place)
            draft = load_draft(settings, draft_plan, backend, name, cache, progress)
    kinds = {
        "quantize": settings.computed_kind(config) or "none",
        "kv_dtype": kv_dtype,
        "tensor_parallel_size": str(settings.tensor_parallel_size),
    }
    numerics = {**backend.numerics(dtype), **kinds}
    layout = PoolLayout(
        model=settings.served_name,
        fingerprint=fingerprint(config, model.weights_digest, dtype, settings.block_size, numerics),
        num_layers=config.num_layers,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=kv_dtype,
        block_size=settings.block_size,
        tensor_parallel_size=settings.tensor_parallel_size,
    )
    plan = _plan(settings, config, dtype, draft_plan)
    plan = replace(plan, arena=place.arena if place else None)
    if device.driver is not None:
        pool_bytes = _pool_bytes_on_gpu(settings, device, model, backend, layout, shared, ranks)
        plan = replace(plan, pool_bytes=pool_bytes)
    return LoadedModel(
        model,
        layout,
        _limits(settings, config),
        plan,
        swap_bytes=settings.swap_bytes,
        ops=backend,
        memory=GpuMemory(device.driver, ",".join(devices), ranks)
        if device.driver
        else FileMemory(),
        engine={**backend.describe(dtype), **kinds, "device": ",".join(dict.fromkeys(devices))},
        ranks=ranks,
        weights=shared,
        draft=draft,
    )


def _load(
    settings: WorkerSettings,
    config: ModelConfig,
    device: OpenDevice,
    backend: kvops.Backend,
    dtype: torch.dtype,
    kv_dtype: KVDtype,
    place: Place | None,
    num_threads: int,
    shared: SharedWeights | None,
    progress: Progress,
) -> tuple[Model, Ranks | None]:
    """The model: that of this process, or divided among ranks, which are started."""
    size = settings.tensor_parallel_size
    if size > 1:
        ranks = Ranks(size, settings.log_level, settings.log_format)
        model = ranks.load(
            *(settings.model.resolve(), dtype, backend, settings.devices),
            *(num_threads, settings.step_limit_s, settings.max_model_len),
            *(settings.block_size, DTYPES[kv_dtype], progress),
            shared=shared,
            keeper=settings.pool_root,
            measures=_measures(settings, device),
        )
        return model, ranks
    return load_model(
        *(settings.model, dtype, backend),
        device=str(device.torch),
        quantize=settings.kind_to_make,
        dequantize=settings.is_dequantized(config),
        cache=_cache(settings, place),
        context=settings.max_model_len,
        progress=progress,
        shared=shared,
    ), None


def _cache(settings: WorkerSettings, place: Place | None) -> Path | None:
    return place.weights_cache(settings.weights_cache) if place else settings.weights_cache


def _shared_weights(
    settings: WorkerSettings, device: OpenDevice, backend: kvops.Backend, progress: Progress
) -> SharedWeights | None:
    """None: the weights are in a file of the host. With several ranks: those of the first one."""
    if device.driver is None or (backend.native and settings.tensor_parallel_size == 1):
        return None
    if not _measures(settings, device):
        return SharedWeights(device.driver, settings.pool_root, progress)
    measure = CudaMeter(device.torch, device.driver.uuid).other
    return SharedWeights(device.driver, settings.pool_root, progress, measure)


def _measures(settings: WorkerSettings, device: OpenDevice) -> bool:
    return device.torch.type == "cuda" and settings.pool_bytes is None


def _num_threads(settings: WorkerSettings, place: Place | None) -> int:
    """The threads of each rank. Ranks divide the CPUs evenly, and lend none to other workers."""
    if settings.threads:
        return settings.threads
    size = settings.tensor_parallel_size
    num_cpus = place.num_cpus if place else len(settings.divided_cpus)
    return num_cpus if size == 1 else max(1, num_cpus // (size * settings.num_expected_workers))


def _pool_bytes_on_gpu(
    settings: WorkerSettings,
    device: OpenDevice,
    model: Model,
    backend: kvops.Backend,
    layout: PoolLayout,
    shared: SharedWeights | None,
    ranks: Ranks | None,
) -> int:
    """The memory of all ranks. Each has the same blocks, so the smallest one decides."""
    if settings.pool_bytes is not None:
        return settings.pool_bytes
    if device.driver is None or device.torch.type != "cuda":
        raise StartupError(f"set pool_memory: {device.name} has no size of its own")
    measure = partial(
        profile,
        CudaMeter(device.torch, device.driver.uuid),
        model.device,
        lambda kv: new_runner(model, kv, layout.block_size, backend),
        layout,
        num_tokens=settings.num_batched_tokens,
        num_rows=settings.max_num_seqs,
        num_workers=settings.num_expected_workers,
        utilization=settings.gpu_memory_utilization,
        shared=shared,
        graph_rows=0 if settings.enforce_eager else settings.max_num_seqs,
    )
    plans = ranks.measure(layout, settings, measure) if ranks else [measure()]
    for name, plan in zip(settings.devices, plans, strict=True):
        log.info("gpu_memory_planned", device=name, **plan.fields(layout.block_bytes))
    return len(plans) * min(plan.pool for plan in plans)


def new_runner(model: Model, kv: Tensor, block_size: int, ops: kvops.Backend) -> Runner:
    """The runner of one process, or of all ranks."""
    if isinstance(model, LeadModel):
        return LeadRunner(model, kv, block_size, ops)
    return Runner(model, kv, block_size, ops)


def _backend(
    settings: WorkerSettings,
    device: OpenDevice,
    config: ModelConfig,
    dtype: torch.dtype,
    kv_dtype: KVDtype,
) -> kvops.Backend:
    """StartupError: it cannot run here, or does not serve the device or the model's attention."""
    try:
        part = Shard(config, 0, settings.tensor_parallel_size).own_config
        shape = attention_shape(part, settings.block_size, dtype, DTYPES[kv_dtype])
        backend = _chosen_backend(settings, shape)
    except (kvops.BackendUnavailable, ValueError) as error:
        raise StartupError(str(error)) from error
    if backend.device != device.torch.type:
        raise StartupError(
            f"backend {backend.name!r} computes on {backend.device}, and the device is "
            f"{device.name}: choose the other device, or the backend 'auto'"
        )
    return backend


def _chosen_backend(settings: WorkerSettings, shape: kvops.AttentionShape) -> kvops.Backend:
    """BackendUnavailable, ValueError: it cannot run here, or does not serve the shape."""
    if settings.kernels == "triton":
        backend, reason = kvops.choose_attention(_attention(settings), shape)
        log.info("attention_chosen", backend=backend.name, reason=reason)
        return backend
    if settings.attention != "auto":
        raise ValueError(
            f"attention {settings.attention!r} is for the backend 'triton'; "
            f"{settings.kernels!r} has attention of its own"
        )
    isa = None if settings.isa == "auto" else settings.isa
    backend = kvops.backend(settings.kernels, isa)
    backend.check_attention(shape)
    return backend


def _attention(settings: WorkerSettings) -> str:
    """The library that computes attention beside the backend triton. ValueError: it does not serve
    graphs."""
    attention = settings.attention
    if attention == "reference" and not settings.enforce_eager:
        raise ValueError(
            "attention 'reference' waits for the device, which no CUDA graph can: add "
            "--enforce-eager"
        )
    return attention


def _dtype(settings: WorkerSettings, config: ModelConfig) -> Dtype:
    if settings.dtype != "auto":
        return settings.dtype
    plain = config.dtype == "float32" and not settings.computed_kind(config)
    return "float32" if plain else "bfloat16"


def _limits(settings: WorkerSettings, config: ModelConfig) -> Limits:
    speculative = settings.speculative_config
    return Limits(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.num_batched_tokens,
        max_model_len=settings.context(config),
        vocab_size=config.vocab_size,
        eos_token_ids=frozenset(config.eos_token_ids),
        look_ahead=LOOK_AHEAD + (speculative.num_speculative_tokens if speculative else 0),
        park_window_s=PARK_WINDOW_S,
    )


def _plan(
    settings: WorkerSettings, config: ModelConfig, dtype: torch.dtype, draft: DraftPlan | None
) -> MemoryPlan:
    """Estimate the memory of weights and activations. Activations: twice those at the widest point
    of a layer, at each rank, and the logits of a full batch. A draft model has smaller ones, before
    the step's; its KV counts for all workers, since a prefill worker does not know how many others
    decode."""
    width = config.hidden_size + max(
        2 * config.intermediate_size, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    )
    num_values = settings.tensor_parallel_size * 2 * settings.num_batched_tokens * width
    num_values += settings.max_num_seqs * config.vocab_size
    weight_bytes = _weight_bytes(settings, settings.model, config, dtype)
    if draft is not None:
        weight_bytes += _weight_bytes(settings, draft.directory, draft.config, dtype)
    return MemoryPlan(
        pool_bytes=settings.pool_bytes,
        num_expected_workers=settings.num_expected_workers,
        weight_bytes=weight_bytes,
        activation_bytes=num_values * torch.float32.itemsize + (draft.kv_bytes if draft else 0),
    )


def _weight_bytes(
    settings: WorkerSettings, directory: Path, config: ModelConfig, dtype: torch.dtype
) -> int:
    dequantized = settings.is_dequantized(config)
    if (gguf := gguf_file(directory)) is not None:
        return served_bytes(GgufFile.read(gguf), dtype.itemsize, dequantized)
    file_bytes = sum(path.stat().st_size for path in weight_files(directory))
    return int(file_bytes * dtype.itemsize / _stored_bytes(config, dtype, dequantized))


def _stored_bytes(config: ModelConfig, dtype: torch.dtype, dequantized: bool) -> float:
    """The bytes of a weight in the files. Linears that keep their quantization keep their size."""
    if config.quantization is None:
        return int(getattr(torch, config.dtype).itemsize)
    kind = config.quantization.kind
    if kind is None or dequantized:
        return 0.5 if kind and kind.startswith("int4") else 1
    return dtype.itemsize
