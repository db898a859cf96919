"""The options of `quire serve`."""

from dataclasses import dataclass
from pathlib import Path

DEFAULT_HOST = "127.0.0.1"
DEFAULT_GRPC_PORT = 50051
DEFAULT_HTTP_PORT = 8000


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The options of one run. None leaves a setting to the services' environment variables and
    defaults.

    `grpc_port`, `http_port`, `operations_port`: ports of the first gateway; each further gateway
    takes the next ones. `threads`: per worker. `pool_memory`, `swap_memory`: sizes such as 2GiB.
    `redis_url`: None starts an embedded Valkey.
    """

    model: Path
    model_name: str
    num_prefill: int = 1
    num_decode: int = 1
    num_gateways: int = 1
    host: str = DEFAULT_HOST
    grpc_port: int = DEFAULT_GRPC_PORT
    http_port: int = DEFAULT_HTTP_PORT
    operations_port: int | None = None
    allowed_hosts: str | None = None
    redis_url: str | None = None
    pool_memory: str | None = None
    swap_memory: str | None = None
    preemption: str | None = None
    block_size: int | None = None
    dtype: str | None = None
    backend: str | None = None
    isa: str | None = None
    quantize: str | None = None
    kv_dtype: str | None = None
    cpus: str | None = None
    numa: str | None = None
    max_gap_ms: float | None = None
    threads: int | None = None
    weights_cache: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    park_window_s: float | None = None
    client_priority: bool = False
    report_cached_tokens: bool = False
    log_level: str = "info"
