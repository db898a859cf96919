"""Loads the model that the settings name, and derives the pool's layout and the worker's limits."""

from dataclasses import dataclass

import torch

import kvops
from kvops.contest import ModelShape
from kvops.native import Lane
from services.common.checkpoint.check import check_format
from services.common.checkpoint.weights import weight_files
from services.common.errors import StartupError
from services.common.pool.layout import Dtype, PoolLayout
from services.common.pool.sizing import MemoryPlan
from services.common.text.model_config import ModelConfig
from services.common.text.tokenizer import tokenizer_file
from services.engine.fingerprint import fingerprint
from services.engine.models import Model, load_model
from services.engine.pool import DTYPES
from services.engine.weights.fused_weights import layer_sections
from services.engine.weights.kinds import kind_of
from services.engine.weights.packed_file import Progress
from services.worker.config import WorkerSettings
from services.worker.cpu.instruction_set import measured_isa
from services.worker.pool_worker import Limits


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: Model
    layout: PoolLayout
    limits: Limits
    plan: MemoryPlan
    swap_bytes: int | None
    ops: kvops.Backend
    engine: dict[str, str]


def load(settings: WorkerSettings, progress: Progress) -> LoadedModel:
    """Load the model. Blocks the thread until the weights are read, and calls `progress` several
    times a second, which may raise to stop the load. Raises StartupError."""
    check_format(settings.model)
    config = ModelConfig.from_directory(settings.model)
    tokenizer_file(settings.model)  # raises without a tokenizer: gateways would not serve the model
    name = _dtype(settings, config)
    dtype = DTYPES[name]
    try:
        backend = kvops.backend(settings.backend, chosen_isa(settings, config, progress))
    except kvops.BackendUnavailable as error:
        raise StartupError(str(error)) from error
    if backend.native is not None:
        backend.native.assign([Lane()] * (settings.threads or len(settings.divided_cpus)))
    model = load_model(
        settings.model,
        dtype,
        backend,
        quantize=settings.quantize,
        cache=settings.weights_cache,
        progress=progress,
    )
    numerics = {**backend.numerics(dtype), "quantize": _quantized(settings, config) or "none"}
    layout = PoolLayout(
        model=settings.served_name,
        fingerprint=fingerprint(config, model.weights_digest, dtype, settings.block_size, numerics),
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=name,
        block_size=settings.block_size,
    )
    return LoadedModel(
        model,
        layout,
        limits=_limits(settings, config),
        plan=_plan(settings, config, dtype),
        swap_bytes=settings.swap_bytes,
        ops=backend,
        engine={**backend.describe(dtype), "quantize": numerics["quantize"]},
    )


def _dtype(settings: WorkerSettings, config: ModelConfig) -> Dtype:
    if settings.dtype != "auto":
        return settings.dtype
    plain = config.dtype == "float32" and not _quantized(settings, config)
    return "float32" if plain else "bfloat16"


def _quantized(settings: WorkerSettings, config: ModelConfig) -> str | None:
    """How the linears are quantized, by the checkpoint or here; None: they are not."""
    stored = config.quantization
    return stored.kind if stored and stored.kind else settings.quantize


def chosen_isa(settings: WorkerSettings, config: ModelConfig, progress: Progress) -> str | None:
    """The instruction set to compute with; None leaves the choice to the kernels."""
    if settings.isa != "auto":
        return settings.isa
    if settings.backend != "cpu":
        return None
    shape = _shape(settings, config)
    return measured_isa(shape, settings.weights_cache or settings.pool_root, progress)


def _shape(settings: WorkerSettings, config: ModelConfig) -> ModelShape:
    sections = layer_sections(config, 0).values()
    stored = config.quantization.kind if config.quantization else None
    wanted = kind_of(settings.quantize) if settings.quantize else _dtype(settings, config)
    return ModelShape(
        kind=stored or wanted,
        linears=tuple((section.num_outputs, section.num_inputs) for section in sections),
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )


def _limits(settings: WorkerSettings, config: ModelConfig) -> Limits:
    context = config.max_position_embeddings
    asked = settings.max_model_len
    if asked is not None and asked > context:
        raise StartupError(f"max_model_len {asked} is beyond the model's context of {context}")
    return Limits(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.num_batched_tokens,
        max_model_len=asked or context,
        vocab_size=config.vocab_size,
        eos_token_ids=frozenset(config.eos_token_ids),
        park_window_s=settings.park_window_s,
    )


def _plan(settings: WorkerSettings, config: ModelConfig, dtype: torch.dtype) -> MemoryPlan:
    """Estimate the memory of weights and activations. Activations: twice those at the widest point
    of a layer, and the logits of a full batch."""
    width = config.hidden_size + max(
        2 * config.intermediate_size, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    )
    num_values = 2 * settings.num_batched_tokens * width
    num_values += settings.max_num_seqs * config.vocab_size
    file_bytes = sum(path.stat().st_size for path in weight_files(settings.model))
    return MemoryPlan(
        pool_bytes=settings.pool_bytes,
        num_expected_workers=settings.num_expected_workers,
        weight_bytes=int(file_bytes * dtype.itemsize / _stored_bytes(config, dtype)),
        activation_bytes=num_values * torch.float32.itemsize,
    )


def _stored_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """The bytes of a weight in the files. Linears that keep their quantization keep their size."""
    if config.quantization is None:
        return int(getattr(torch, config.dtype).itemsize)
    return dtype.itemsize if config.quantization.kind else 1
