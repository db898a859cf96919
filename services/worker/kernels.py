"""Opens the kernels with which a worker computes, as its settings say."""

import kvops
from services.engine.device.opening import OpenDevice, open_device
from services.engine.device.steps import attention_shape
from services.engine.pool import DTYPES
from services.model.checkpoint.shards import Shard
from services.model.config.model_config import ModelConfig
from services.pool.layout import Dtype, KVDtype
from services.runtime.errors import StartupError
from services.runtime.logging import get_logger
from services.worker.config import WorkerSettings

log = get_logger(__name__)


def check_kernels(settings: WorkerSettings, config: ModelConfig) -> None:
    """Raises StartupError if this machine does not have the device, or if the kernels for it do not
    serve the model with these settings."""
    for name in reversed(settings.devices):  # the first is the thread's own then
        device = open_device(name)
    open_backend(settings, config, device)


def open_backend(
    settings: WorkerSettings, config: ModelConfig, device: OpenDevice
) -> kvops.Backend:
    """Raises StartupError if the backend cannot run here, or does not serve the device or the
    model's attention."""
    try:
        part = Shard(config, 0, settings.tensor_parallel_size).own_config
        dtype = DTYPES[computed_dtype(settings, config)]
        kv_dtype = DTYPES[stored_kv_dtype(settings, config)]
        shape = attention_shape(part, settings.block_size, dtype, kv_dtype)
        backend = chosen_backend(settings, shape)
    except (kvops.BackendUnavailable, ValueError) as error:
        raise StartupError(str(error)) from error
    if backend.device != device.torch.type:
        raise StartupError(
            f"backend {backend.name!r} computes on {backend.device}, and the device is "
            f"{device.name}: choose the other device, or the backend 'auto'"
        )
    return backend


def chosen_backend(settings: WorkerSettings, shape: kvops.AttentionShape) -> kvops.Backend:
    """Raises BackendUnavailable if the backend cannot run here, and ValueError if it does not serve
    the shape."""
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
    """The library that computes attention beside the backend triton. Raises ValueError if the
    library does not serve graphs."""
    attention = settings.attention
    if attention == "reference" and not settings.enforce_eager:
        raise ValueError(
            "attention 'reference' waits for the device, which no CUDA graph can: add "
            "--enforce-eager"
        )
    return attention


def computed_dtype(settings: WorkerSettings, config: ModelConfig) -> Dtype:
    if settings.dtype != "auto":
        return settings.dtype
    plain = config.dtype == "float32" and not settings.computed_kind(config)
    return "float32" if plain else "bfloat16"


def stored_kv_dtype(settings: WorkerSettings, config: ModelConfig) -> KVDtype:
    return computed_dtype(settings, config) if settings.kv_dtype == "auto" else settings.kv_dtype
