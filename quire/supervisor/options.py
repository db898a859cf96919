"""The options of `quire serve`. A field is a flag: its name, its help and the services that get it
are declared here and nowhere else."""

from dataclasses import dataclass, fields
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, get_args, get_type_hints

from typer import Argument, Option

from quire.sizes import duration, memory_size
from quire.supervisor.model_source import EMBEDDED

DEFAULT_HOST = "127.0.0.1"
DEFAULT_GRPC_PORT = 50051
DEFAULT_HTTP_PORT = 8000
EMBEDDED_POOL_MEMORY = "256MiB"
"""Enough for hundreds of chats with the embedded model. The default for other models, half of the
free memory, would take longer to allocate than the embedded model takes to load."""


class To(Enum):
    """The services that get an option as a setting of the same name."""

    WORKERS = "prefill and decode workers"
    GATEWAYS = "gateways"


ToolCallParser = Literal[
    "auto",
    "none",
    "hermes",
    "llama3_json",
    "pythonic",
    "mistral",
    "phi4_mini_json",
    "openai",
]

_engine = partial(Option, rich_help_panel="Engine", show_default=False)
_network = partial(Option, rich_help_panel="Network", show_default=False)
_port = partial(Option, rich_help_panel="Network", metavar="PORT", min=0, max=65535)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The options of one run. None leaves a setting to the services' environment variables and
    defaults.

    `grpc_port`, `http_port`, `operations_port`: ports of the first gateway; each further gateway
    takes the next ones. `quire.supervisor.models` finds the models and their own options.
    """

    models: Annotated[
        list[str] | None,
        Argument(
            metavar="[[NAME,ALIAS...=]MODEL]...",
            help="the models to serve, each a directory in Hugging Face format, a GGUF file, an id "
            f"in the local Hugging Face cache, or `{EMBEDDED}`, the small model that comes with "
            "Quire and is the default",
            show_default=False,
        ),
    ] = None
    model: Annotated[str | None, Option(metavar="DIR|FILE|ID", help="the same, for one model")] = (
        None
    )
    model_name: Annotated[
        str | None,
        Option(
            "--served-model-name",
            metavar="NAME[,ALIAS...]",
            help="the model's names for clients; default: its id, or the name of the directory or "
            "file",
        ),
    ] = None
    own: Annotated[
        list[str] | None,
        Option(
            "--set",
            metavar="MODEL.OPTION=VALUE",
            help="an option of one of several models, such as big.pool_memory=4GiB or big.decode=2",
            show_default=False,
        ),
    ] = None
    num_prefill: Annotated[
        int,
        Option("--prefill", min=0, metavar="N", help="prefill workers; 0: other hosts have them"),
    ] = 1
    num_decode: Annotated[
        int,
        Option("--decode", min=0, metavar="N", help="decode workers; 0: other hosts have them"),
    ] = 1
    num_gateways: Annotated[
        int, Option("--gateways", min=1, metavar="N", help="gateways, each on the next ports")
    ] = 1

    pool_memory: Annotated[
        str | None,
        To.WORKERS,
        _engine(
            metavar="SIZE",
            parser=memory_size,
            help="the pool's KV memory, such as 2GiB; default: half of what is free after the "
            f"weights ({EMBEDDED_POOL_MEMORY} for the embedded model)",
        ),
    ] = None
    swap_memory: Annotated[
        str | None,
        To.WORKERS,
        _engine(
            metavar="SIZE",
            parser=memory_size,
            help="memory beside the pool to which preempted requests are copied; default: none",
        ),
    ] = None
    preemption: Annotated[
        Literal["auto", "swap", "recompute"] | None,
        To.WORKERS,
        _engine(help="how requests are preempted; default: auto, swap if that costs less"),
    ] = None
    tensor_parallel_size: Annotated[
        int | None,
        To.WORKERS,
        _engine(
            min=1,
            max=8,
            metavar="N",
            help="processes of each worker, which divide the model: 1, 2, 4 or 8; default: 1",
        ),
    ] = None
    block_size: Annotated[
        int | None,
        To.WORKERS,
        _engine(min=1, metavar="TOKENS", help="positions of a block; default: 16"),
    ] = None
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"] | None,
        To.WORKERS,
        _engine(help="weights and activations; default: auto, by the model and the processor"),
    ] = None
    device: Annotated[
        str | None,
        To.WORKERS,
        _engine(metavar="DEVICE", help="cpu, or a GPU such as cuda:0; default: cpu"),
    ] = None
    gpu_memory_utilization: Annotated[
        float | None,
        To.WORKERS,
        _engine(
            min=0.01,
            max=1.0,
            metavar="SHARE",
            help="share of the GPU's memory for the pool and all workers; default: 0.9",
        ),
    ] = None
    backend: Annotated[
        Literal["auto", "cpu", "reference", "triton"] | None,
        To.WORKERS,
        _engine(help="kernels; default: auto, cpu, or triton on a GPU"),
    ] = None
    attention: Annotated[
        Literal["auto", "flashinfer", "flash", "triton", "reference"] | None,
        To.WORKERS,
        _engine(
            help="attention beside the triton kernels; default: auto, by the GPU and what is "
            "installed"
        ),
    ] = None
    enforce_eager: Annotated[
        bool | None,
        To.WORKERS,
        _engine(help="launch each kernel of a decode step instead of replaying CUDA graphs"),
    ] = None
    isa: Annotated[
        Literal["auto", "amx", "avx512_bf16", "avx512", "avx2", "portable"] | None,
        To.WORKERS,
        _engine(
            help="instruction set of the CPU kernels; default: auto, the fastest one here, "
            "measured if in doubt"
        ),
    ] = None
    quantize: Annotated[
        Literal["int8", "int4", "int4-32", "int4-128"] | None,
        To.WORKERS,
        _engine(
            help="run linears with 8-bit or 4-bit weights (groups of 64, 32 or 128 inputs) and "
            "8-bit activations"
        ),
    ] = None
    kv_dtype: Annotated[
        Literal["auto", "int8"] | None,
        To.WORKERS,
        _engine(help="keys and values; default: auto, as --dtype; int8: half of bfloat16's memory"),
    ] = None
    cpus: Annotated[
        str | None,
        To.WORKERS,
        _engine(
            metavar="LIST",
            help="CPUs that the workers share, such as 0-3,6; default: auto, one of each core",
        ),
    ] = None
    threads: Annotated[
        int | None,
        To.WORKERS,
        _engine(min=1, metavar="N", help="threads of each worker, on any CPU; excludes --cpus"),
    ] = None
    numa: Annotated[
        Literal["auto", "off"] | None,
        To.WORKERS,
        _engine(
            help="auto: on a host with several NUMA nodes, threads and memory of a worker are on "
            "nodes of its own; off: all CPUs are one node; default: auto"
        ),
    ] = None
    max_gap_ms: Annotated[
        float | None,
        To.WORKERS,
        _engine(
            parser=duration,
            metavar="MS",
            help="the inter-token latency up to which prompts may use the CPUs of decode workers "
            "too; 0: never; default: 100",
        ),
    ] = None
    weights_cache: Annotated[
        str | None,
        To.WORKERS,
        _engine(
            metavar="DIR", help="directory of packed weights, or none; default: ~/.cache/quire"
        ),
    ] = None
    max_model_len: Annotated[
        int | None,
        To.WORKERS,
        _engine(
            min=1,
            metavar="TOKENS",
            help="longest prompt + generation; default: the model's context",
        ),
    ] = None
    max_num_seqs: Annotated[
        int | None,
        To.WORKERS,
        _engine(min=1, metavar="N", help="sequences of one decode worker; default: 64"),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None, To.WORKERS, _engine(min=1, metavar="N", help="tokens of one step")
    ] = None
    speculative_config: Annotated[
        str | None,
        To.WORKERS,
        _engine(
            metavar="JSON",
            help="speculative decoding, such as "
            """'{"method": "ngram", "num_speculative_tokens": 5}'; default: none""",
        ),
    ] = None
    park_window_s: Annotated[
        float | None,
        To.WORKERS,
        _engine(
            "--park-window",
            parser=duration,
            metavar="SECONDS",
            help="how long decode workers keep requests whose gateway is gone; default: 10",
        ),
    ] = None

    host: Annotated[
        str, Option(help="address on which the gateways listen", rich_help_panel="Network")
    ] = DEFAULT_HOST
    grpc_port: Annotated[int, _port(help="gRPC; 0 takes a free one")] = DEFAULT_GRPC_PORT
    http_port: Annotated[int, _port(help="OpenAI HTTP; 0 takes a free one")] = DEFAULT_HTTP_PORT
    operations_port: Annotated[
        int | None,
        _port(
            help="serve operations (drain, scale, audit ...) on this port of 127.0.0.1 too; "
            "default: only on a socket of this user"
        ),
    ] = None
    allowed_hosts: Annotated[
        str | None,
        To.GATEWAYS,
        _network(
            metavar="LIST",
            help="hosts that HTTP requests may name, such as localhost,*.example.com; default: any",
        ),
    ] = None
    api_keys_file: Annotated[
        Path | None,
        To.GATEWAYS,
        _network("--api-keys", metavar="FILE", help="file of API keys; see `quire keys --help`"),
    ] = None
    public_tls_cert: Annotated[
        Path | None,
        To.GATEWAYS,
        _network("--tls-cert", metavar="FILE", help="certificate of the gateways; default: no TLS"),
    ] = None
    public_tls_key: Annotated[
        Path | None, To.GATEWAYS, _network("--tls-key", metavar="FILE", help="its key")
    ] = None
    public_client_ca: Annotated[
        Path | None,
        To.GATEWAYS,
        _network(
            "--tls-client-ca",
            metavar="FILE",
            help="the CA whose certificates clients must show; default: clients show none",
        ),
    ] = None
    cors_origins: Annotated[
        str | None,
        To.GATEWAYS,
        _network(
            metavar="LIST", help="origins whose web pages may call the HTTP API; default: none"
        ),
    ] = None
    redis_url: Annotated[
        str | None,
        _network(metavar="URL", help="redis://, rediss:// or unix://; default: an embedded Valkey"),
    ] = None
    service_host: Annotated[
        str | None,
        _network(
            metavar="ADDRESS",
            help="where workers, block manager and movers listen and are reached, also by other "
            "hosts; default: 127.0.0.1",
        ),
    ] = None
    mover: Annotated[
        bool | None,
        _network(
            help="copy KV from the pools of other hosts; default: with --redis-url and "
            "--service-host, unless the pools are on a GPU"
        ),
    ] = None
    secret_file: Annotated[
        Path | None,
        _network(
            metavar="FILE",
            help="the deployment's secret, the same on all hosts; default: one of this run",
        ),
    ] = None
    service_tls: Annotated[
        Path | None,
        _network(
            metavar="DIR",
            help="certificates of `quire certs` for connections between services; default: no TLS",
        ),
    ] = None
    generation_config: Annotated[
        str | None,
        To.GATEWAYS,
        _network(
            metavar="auto|vllm|DIR",
            help="default sampling parameters: those of the model's generation_config.json (auto, "
            "the default), none (vllm), or those of a directory's generation_config.json",
        ),
    ] = None
    override_generation_config: Annotated[
        str | None,
        To.GATEWAYS,
        _network(
            metavar="JSON",
            help='default sampling parameters that replace single ones: {"temperature": 0.5}',
        ),
    ] = None
    tool_call_parser: Annotated[
        ToolCallParser | None,
        To.GATEWAYS,
        _network(help="format of tool calls; default: auto, that of the chat template"),
    ] = None
    reasoning_parser: Annotated[
        Literal["auto", "none", "think", "mistral"] | None,
        To.GATEWAYS,
        _network(help="tags of reasoning; default: auto, those of the chat template"),
    ] = None
    lora: Annotated[
        str | None,
        To.GATEWAYS,
        _engine(
            metavar="NAME=DIR,..",
            help="LoRA adapters to serve, which requests name as their model; others can be loaded "
            "at run time",
        ),
    ] = None
    max_loras: Annotated[
        int | None,
        To.GATEWAYS,
        To.WORKERS,
        _engine(min=0, metavar="N", help="most LoRA adapters at a time; default: 8"),
    ] = None
    max_lora_rank: Annotated[
        int | None,
        To.GATEWAYS,
        To.WORKERS,
        _engine(min=1, max=512, metavar="N", help="largest rank of a LoRA adapter; default: 64"),
    ] = None
    client_priority: Annotated[
        bool,
        To.GATEWAYS,
        _network(
            "--client-priority",
            help="accept priorities from clients; without it, any priority other than 0 is refused",
        ),
    ] = False
    report_cached_tokens: Annotated[
        bool,
        To.GATEWAYS,
        _network(
            "--report-cached-tokens",
            help="report to every client how many of its prompt's tokens were cached; default: "
            "only to requests with a cache_salt",
        ),
    ] = False
    otlp_endpoint: Annotated[
        str | None,
        To.WORKERS,
        To.GATEWAYS,
        _network(
            metavar="URL",
            help="collector of traces, OTLP over gRPC, such as http://127.0.0.1:4317; default: no "
            "traces",
        ),
    ] = None
    trace_ratio: Annotated[
        float | None,
        To.GATEWAYS,
        _network(
            min=0.0,
            max=1.0,
            metavar="SHARE",
            help="share of the requests to trace whose client has sent no traceparent; default: 1",
        ),
    ] = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Option(help="the lowest level that the services log"),
    ] = "info"

    @property
    def has_movers(self) -> bool:
        if self.mover is not None:
            return self.mover
        has_others = self.shares_store and self.service_host is not None
        return has_others and not self.is_on_gpu

    @property
    def shares_store(self) -> bool:
        """Whether other hosts may belong to the deployment."""
        return self.redis_url is not None

    @property
    def is_on_gpu(self) -> bool:
        return self.device not in (None, "cpu")

    def settings(self, services: To) -> dict[str, str]:
        """The settings that the user has chosen for these services, by name in capitals."""
        chosen = {name: getattr(self, name) for name in self.names(services)}
        return {
            name.upper(): "true" if value is True else str(value)
            for name, value in chosen.items()
            if value is not None and value is not False
        }

    @classmethod
    def names(cls, services: To) -> tuple[str, ...]:
        """The options that these services get."""
        hints = get_type_hints(cls, include_extras=True)
        return tuple(f.name for f in fields(cls) if services in get_args(hints[f.name])[1:])
