"""Checks settings of a worker against the checkpoint's configuration, before anything is loaded."""

from typing import TYPE_CHECKING, get_args

from services.model.config.model_config import ModelConfig
from services.model.config.quantization import Quantization
from services.pool.layout import KVDtype, PoolLayout
from services.pool.sizing import MIN_BLOCKS, format_size
from services.runtime.errors import StartupError

if TYPE_CHECKING:
    from services.worker.config import WorkerSettings


def check_quantize(settings: "WorkerSettings", config: ModelConfig) -> None:
    """Raises StartupError if the linears cannot be quantized as the settings say."""
    wanted = settings.quantize
    if wanted not in get_args(Quantization):
        return
    if settings.kernels != "cpu":
        raise StartupError(f"backend {settings.kernels!r} has no {wanted} kernels; 'cpu' has")
    stored = config.quantization.kind if config.quantization else None
    if stored is not None and stored != ("int4-64" if wanted == "int4" else wanted):
        raise StartupError(
            f"the checkpoint is already quantized ({stored}); it cannot be quantized again, to "
            f"{wanted}"
        )


def check_pool(settings: "WorkerSettings", config: ModelConfig) -> None:
    """Raises StartupError if the pool memory that the settings name has no room for MIN_BLOCKS
    blocks."""
    block_bytes = _smallest_block_bytes(settings, config)
    num_bytes = settings.pool_bytes
    if num_bytes is not None and num_bytes < MIN_BLOCKS * block_bytes:
        raise StartupError(
            f"pool memory {format_size(num_bytes)} is too small: the KV pool needs at least "
            f"{MIN_BLOCKS} blocks of {format_size(block_bytes)}, each of {settings.block_size} "
            "tokens"
        )


def _smallest_block_bytes(settings: "WorkerSettings", config: ModelConfig) -> int:
    """The bytes of a block of all ranks. With `auto` the values may be larger than bfloat16."""
    dtype: KVDtype = "bfloat16"
    if settings.kv_dtype != "auto":
        dtype = settings.kv_dtype
    elif settings.dtype != "auto":
        dtype = settings.dtype
    shape = config.num_layers, config.num_kv_heads, config.head_dim
    return PoolLayout("", "", *shape, dtype, settings.block_size).block_bytes
