"""The text that `quire serve` prints when it is ready: models, pools, addresses, first commands."""

from typing import TYPE_CHECKING

from quire.addresses import DEFAULT_ADDRESS
from quire.sockets import join_host_port
from quire.supervisor.options import DEFAULT_GRPC_PORT, ServeOptions

if TYPE_CHECKING:
    from quire.supervisor.readiness import Serving

_WILDCARDS = ("0.0.0.0", "::")
_QUESTION = "What is the capital of France?"


def banner(options: ServeOptions, serving: "Serving", took_s: float) -> str:
    host = "127.0.0.1" if options.host in _WILDCARDS else options.host
    ports = range(options.grpc_port, options.grpc_port + options.num_gateways)
    address = ",".join(join_host_port(host, port) for port in ports)
    flag = "" if address == DEFAULT_ADDRESS else f"--address {address} "
    scheme = "https" if options.public_tls_cert else "http"
    http = f"{scheme}://{join_host_port(host, options.http_port)}"
    if options.public_tls_cert:
        flag += "--tls-ca CA "
    if len(serving.models) > 1:
        flag += f"--model {serving.models[0].id} "
    key = "QUIRE_API_KEY=KEY " if options.api_keys_file else ""
    header = "-H 'Authorization: Bearer KEY' " if options.api_keys_file else ""
    port = "" if options.grpc_port == DEFAULT_GRPC_PORT else f" --run {options.grpc_port}"
    lines = [
        f"Quire is serving, {took_s:.1f} s after its start.",
        *(f"  model  {model.id} ({model.dtype}, up to {model.max_model_len:,} tokens a request)"
          for model in serving.models),
        *(f"  pool   {pool.pool_id}: {pool.num_blocks:,} blocks of {pool.block_size} tokens, "
          f"{pool.num_blocks * pool.block_bytes / 2**20:,.0f} MiB" for pool in serving.pools),
        f"  gRPC   {address}",
        f"  HTTP   {http}/v1",
        "Try it:",
        f'  {key}quire generate {flag}--temperature 0 "{_QUESTION}"',
        f"  curl {http}/v1/chat/completions {header}\\",
        "    -H 'Content-Type: application/json' \\",
        f"    -d '{{\"messages\": [{{\"role\": \"user\", \"content\": \"{_QUESTION}\"}}], "
        f"\"temperature\": 0, \"model\": \"{serving.models[0].id if serving.models else ''}\"}}'",
        *(f"warning: {model.id} has a context of {model.context:,} tokens, and its pool has room "
          f"for {model.max_model_len:,}: --pool-memory gives it more"
          for model in serving.models if model.max_model_len < model.context),
        f"End it with Ctrl-C, or `quire down{port}`.",
    ]  # fmt: skip
    return "\n".join(lines)
