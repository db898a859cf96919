"""Checks settings of a worker against the checkpoint's configuration, before anything is loaded."""

import os
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, get_args

from services.model.config.model_config import ModelConfig
from services.model.config.quantization import FLOAT_KINDS, Quantization
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
    stored = config.quantization.kind if config.quantization else None
    if stored is None or stored in FLOAT_KINDS:
        return
    if stored != ("int4-64" if wanted == "int4" else wanted):
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


def check_cache(settings: "WorkerSettings", config: ModelConfig) -> None:
    """Makes the cache directory, if there is to be one. Raises StartupError if it cannot be used:
    its files hold users' prompts, and a pool believes what is in them."""
    directory, budget = settings.cache_directory, settings.cache_budget
    if directory is None:
        return
    if settings.tensor_parallel_size > 1:
        raise StartupError("cache_directory: only workers of one rank keep blocks in files")
    if settings.secret is None and settings.secret_file is None:
        raise StartupError(
            "cache_directory without secret or secret_file: hashes of blocks depend on the secret, "
            "so the next run would not find any"
        )
    fewest = 4 * settings.num_expected_workers * _smallest_block_bytes(settings, config)
    if budget < fewest:
        raise StartupError(
            f"cache_bytes {format_size(budget)} is too small: at least {format_size(fewest)}"
        )
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
        with TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise StartupError(f"cache_directory {directory}: {error.strerror}") from error
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise StartupError(
            f"cache_directory {directory} belongs to another user or is open to others (mode "
            f"{status.st_mode & 0o777:04o}); it must be yours, with mode 0700"
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
