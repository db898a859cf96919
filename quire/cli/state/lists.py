"""`quire models`, `quire workers`, `quire pools`."""

import time

from quire.cli.flags import GatewayFlags, Json, OperationsFlags
from quire.cli.output import Columns, percent, print_items
from quire.reports import Model, Pool, Worker
from quire.sizes import format_size
from quire.worker_names import worker_name

_MODEL_COLUMNS: Columns[Model] = {
    "MODEL": lambda model: model.id,
    "CONTEXT": lambda model: model.context or model.max_model_len,
    "ROOM": lambda model: model.max_model_len,
    "BLOCK SIZE": lambda model: model.block_size,
    "DTYPE": lambda model: model.dtype,
}
_WORKER_COLUMNS: Columns[Worker] = {
    "WORKER": lambda worker: worker.name,
    "ROLE": lambda worker: f"{worker.role}, prefill" if worker.engine.get("mix") else worker.role,
    "MODEL": lambda worker: worker.model,
    "STATE": lambda worker: worker.state,
    "UP": lambda worker: _uptime(worker),
    "PID": lambda worker: str(worker.pid or ""),
    "ADDRESS": lambda worker: worker.address,
    "POOL": lambda worker: worker.pool_id,
    "RUNNING": lambda worker: worker.num_running,
    "WAITING": lambda worker: worker.num_waiting,
    "FREE SLOTS": lambda worker: worker.num_free_slots,
    "KERNELS": lambda worker: _kernels(worker),
}
_POOL_COLUMNS: Columns[Pool] = {
    "POOL": lambda pool: pool.pool_id,
    "MODEL": lambda pool: pool.model,
    "MEMORY": lambda pool: format_size(pool.num_blocks * pool.block_bytes),
    "BLOCKS": lambda pool: pool.num_blocks,
    "FREE": lambda pool: pool.num_free,
    "CACHED": lambda pool: pool.num_cached,
    "HELD": lambda pool: pool.num_held,
    "RETAINED": lambda pool: pool.num_retained,
    "WAITING": lambda pool: pool.num_waiters,
    "HIT RATE": lambda pool: percent(pool.num_prefix_hits, pool.num_prefix_queries),
    "LEDGER": lambda pool: "recovering" if pool.recovering else "whole",
}


def _uptime(worker: Worker) -> str:
    """Return how long the worker has been there, such as 3h12m."""
    if not worker.started_unix_ms:
        return ""
    minutes, seconds = divmod(max(0, int(time.time() - worker.started_unix_ms / 1000)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"


def _kernels(worker: Worker) -> str:
    """Describe the worker's backend, instruction set or GPU, dtype, and quantized weights and
    KV."""
    names = [worker.engine.get(key, "") for key in ("backend", "isa", "dtype", "quantize")]
    if (kv_dtype := worker.engine.get("kv_dtype")) in ("int8", "fp8"):
        names.append(f"kv-{kv_dtype}")
    return " ".join(name for name in names if name not in ("", "none"))


def models(gateway: GatewayFlags, as_json: Json = False) -> None:
    """List the models being served."""
    with gateway.connect() as client:
        print_items(as_json, _MODEL_COLUMNS, client.models())


def workers(gateway: OperationsFlags, as_json: Json = False) -> None:
    """List the workers and their load."""
    with gateway.connect() as client:
        print_items(as_json, _WORKER_COLUMNS, client.workers())


def pools(gateway: OperationsFlags, as_json: Json = False) -> None:
    """List the pools and their blocks."""
    with gateway.connect() as client:
        found = client.pools()
    print_items(as_json, _POOL_COLUMNS, found)
    for pool in found:
        if pool.missing_worker_ids and not as_json:
            print(
                f"{pool.pool_id} waits for {', '.join(map(worker_name, pool.missing_worker_ids))}"
            )
