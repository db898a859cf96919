"""The options that gateways get."""

from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from quire.choices import ReasoningParser, ToolCallParser
from quire.options.flag import Flag
from quire.options.shared import Options, SeveralTexts, split_by_commas

_NETWORK = Flag(panel="Network")


class GatewayOptions(Options):
    """The options that say how gateways treat requests, and which clients reach them."""

    generation_config: Annotated[str, Flag("auto|vllm|DIR", panel="Network")] = Field(
        default="auto",
        description="[default sampling parameters](../sampling.md): from the model's "
        "generation_config.json (auto), from another directory's (DIR), or none (vllm)",
    )
    override_generation_config: Annotated[str | None, Flag("JSON", panel="Network")] = Field(
        default=None,
        description='default sampling parameters that replace single ones: {"temperature": 0.5}',
    )
    tool_call_parser: Annotated[ToolCallParser, _NETWORK] = Field(
        default="auto",
        description="format of [tool calls](../tool-calls.md); auto: the chat template's; "
        "none: the models have none",
    )
    reasoning_parser: Annotated[ReasoningParser, _NETWORK] = Field(
        default="auto",
        description="tags of [reasoning](../tool-calls.md#reasoning); auto: the chat "
        "template's; none: the models have none",
    )
    lora: Annotated[tuple[tuple[str, str], ...], Flag("NAME=DIR,..")] = Field(
        default=(),
        description="[LoRA adapters](../lora.md) to serve from the start, which requests name as "
        "their model; others can be loaded at run time",
    )
    client_priority: Annotated[bool, _NETWORK] = Field(
        default=False,
        description="accept [priorities](requests.md#priority) from clients; without it, any "
        "priority other than 0 is refused",
    )
    auto_roles: Annotated[bool, Flag()] = Field(
        default=False,
        description="let workers [take the other role](scaling.md#roles) as the load asks, by the "
        "targets of quire:recommended_workers",
    )
    report_cached_tokens: Annotated[bool, _NETWORK] = Field(
        default=False,
        description="report to every client how many of its prompt's tokens were cached; without "
        "it, [only to requests with a cache_salt](requests.md#what-a-client-may-send)",
    )
    per_request_metrics: Annotated[bool, _NETWORK] = Field(
        default=False,
        description="give every answer [its own figures](requests.md#figures-of-one-request); "
        "without it, only answers to requests with include_metrics have them",
    )
    retained_share: Annotated[float, Flag("SHARE", panel="Network")] = Field(
        default=0.25,
        ge=0,
        le=1,
        description="share of each pool's blocks that all clients together may "
        "[retain](../cache.md); 0: none",
    )
    allowed_hosts: Annotated[SeveralTexts, Flag("LIST", panel="Network")] = Field(
        default=(),
        description="hosts, by commas, that HTTP requests may be for: a name, an address, or "
        "*.example.com; requests for others are refused with 400, /health and /metrics included; "
        "default: any",
    )
    api_keys_file: Annotated[Path | None, Flag("FILE", "--api-keys", "Network")] = Field(
        default=None,
        description="file of [API keys](access.md#api-keys) (`quire keys`), read again when it "
        "changes; default: no keys",
    )
    public_tls_cert: Annotated[Path | None, Flag("FILE", "--tls-cert", "Network")] = Field(
        default=None,
        description="certificate for clients, over gRPC and HTTP ([TLS](../security.md#tls)); "
        "default: no TLS",
    )
    public_tls_key: Annotated[Path | None, Flag("FILE", "--tls-key", "Network")] = Field(
        default=None, description="its key"
    )
    public_client_ca: Annotated[Path | None, Flag("FILE", "--tls-client-ca", "Network")] = Field(
        default=None,
        description="the CA whose certificates clients must show; default: clients show none",
    )
    cors_origins: Annotated[SeveralTexts, Flag("LIST", panel="Network")] = Field(
        default=(),
        description="origins, by commas, whose web pages may call the HTTP API; *: all; default: "
        "none",
    )

    @field_validator("allowed_hosts")
    @classmethod
    def _hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            if "*" in host.removeprefix("*.") and host != "*":
                raise ValueError(
                    f"{host!r}: * stands only for all, or for a first part, as in *.a.b"
                )
        return hosts

    @field_validator("lora", mode="before")
    @classmethod
    def _adapters(cls, value: object) -> object:
        """Raises ValueError if the text is not name=directory, or if a name occurs twice."""
        pairs = split_by_commas(value)
        if not isinstance(pairs, list | tuple) or not all(isinstance(one, str) for one in pairs):
            return pairs
        found = [tuple(part.strip() for part in one.partition("=")[::2]) for one in pairs]
        if not all(name and directory for name, directory in found):
            raise ValueError(f"{value!r} is not name=directory, by commas")
        if len({name for name, _ in found}) < len(found):
            raise ValueError("a name of an adapter twice")
        return tuple(found)
