"""The options of `quire serve` that gateways get as settings of the same names."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from quire.choices import ReasoningParser, ToolCallParser
from quire.supervisor.worker_options import SharedOptions, engine, network


@dataclass(frozen=True)
class GatewayOptions(SharedOptions):
    """The options that gateways get."""

    allowed_hosts: Annotated[
        str | None,
        network(
            metavar="LIST",
            help="hosts that HTTP requests may name, such as localhost,*.example.com; default: any",
        ),
    ] = None
    api_keys_file: Annotated[
        Path | None,
        network("--api-keys", metavar="FILE", help="file of API keys; see `quire keys --help`"),
    ] = None
    public_tls_cert: Annotated[
        Path | None,
        network("--tls-cert", metavar="FILE", help="certificate of the gateways; default: no TLS"),
    ] = None
    public_tls_key: Annotated[Path | None, network("--tls-key", metavar="FILE", help="its key")] = (
        None
    )
    public_client_ca: Annotated[
        Path | None,
        network(
            "--tls-client-ca",
            metavar="FILE",
            help="the CA whose certificates clients must show; default: clients show none",
        ),
    ] = None
    cors_origins: Annotated[
        str | None,
        network(
            metavar="LIST", help="origins whose web pages may call the HTTP API; default: none"
        ),
    ] = None
    generation_config: Annotated[
        str | None,
        network(
            metavar="auto|vllm|DIR",
            help="default sampling parameters: those of the model's generation_config.json (auto, "
            "the default), none (vllm), or those of a directory's generation_config.json",
        ),
    ] = None
    override_generation_config: Annotated[
        str | None,
        network(
            metavar="JSON",
            help='default sampling parameters that replace single ones: {"temperature": 0.5}',
        ),
    ] = None
    tool_call_parser: Annotated[
        ToolCallParser | None,
        network(help="format of tool calls; default: auto, that of the chat template"),
    ] = None
    reasoning_parser: Annotated[
        ReasoningParser | None,
        network(help="tags of reasoning; default: auto, those of the chat template"),
    ] = None
    lora: Annotated[
        str | None,
        engine(
            metavar="NAME=DIR,..",
            help="LoRA adapters to serve, which requests name as their model; others can be loaded "
            "at run time",
        ),
    ] = None
    client_priority: Annotated[
        bool,
        network(
            "--client-priority",
            help="accept priorities from clients; without it, any priority other than 0 is refused",
        ),
    ] = False
    report_cached_tokens: Annotated[
        bool,
        network(
            "--report-cached-tokens",
            help="report to every client how many of its prompt's tokens were cached; default: "
            "only to requests with a cache_salt",
        ),
    ] = False
    stream_ping_s: Annotated[
        float | None,
        network(
            "--stream-ping",
            min=0.0,
            metavar="SECONDS",
            help="how long an HTTP stream may be silent before it sends a comment, so that proxies "
            "do not cut it; 0: it sends none; default: 15",
        ),
    ] = None
    trace_ratio: Annotated[
        float | None,
        network(
            min=0.0,
            max=1.0,
            metavar="SHARE",
            help="share of the requests to trace whose client has sent no traceparent; default: 1",
        ),
    ] = None
