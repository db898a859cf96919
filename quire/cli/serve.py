"""`quire serve` and `quire down`: start and end a whole deployment on this host."""

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli.terminal import add_command, memory_size, positive
from quire.supervisor import RUNS, ServeOptions, serve, stop_run
from quire.supervisor.model_source import EMBEDDED, check_model, find_model
from quire.supervisor.options import DEFAULT_GRPC_PORT, DEFAULT_HOST, DEFAULT_HTTP_PORT
from quire.supervisor.run_directory import free_port

if TYPE_CHECKING:
    from quire.cli.terminal import Commands

EMBEDDED_POOL_MEMORY = "256MiB"
"""Enough for hundreds of chats with the embedded model. The default for other models, half of the
free memory, would take longer to allocate than the embedded model takes to load."""


def add_commands(commands: "Commands") -> None:
    command = add_command(
        commands, "serve", run_serve, help_text="serve a model on this host, in the foreground"
    )
    command.add_argument(
        "--model",
        default=EMBEDDED,
        metavar="DIR|FILE|ID",
        help="a directory in Hugging Face format, a GGUF file, an id in the local Hugging Face "
        "cache, or `%(default)s`, the small model that comes with Quire (the default)",
    )
    command.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="what clients call it; default: its id, or the name of the directory or file",
    )
    command.add_argument("--prefill", type=positive, default=1, metavar="N", help="workers")
    command.add_argument("--decode", type=positive, default=1, metavar="N", help="workers")
    command.add_argument(
        "--gateways", type=positive, default=1, metavar="N", help="on one port after the other"
    )
    _add_engine(command)
    _add_network(command)
    _add_run_root(command)
    down = add_command(commands, "down", run_down, help_text="end a `quire serve` of this user")
    down.add_argument(
        "--grpc-port", type=_port, metavar="PORT", help="needed where several runs are there"
    )
    _add_run_root(down)


def _add_run_root(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--run-root",
        type=Path,
        default=RUNS,
        metavar="DIR",
        help="a tmpfs, where a run has its directory and its pools; %(default)s",
    )


def _add_engine(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("engine")
    group.add_argument(
        "--pool-memory",
        type=memory_size,
        metavar="SIZE",
        help="the pool's KV memory, such as 2GiB; default: half of what is free after the "
        f"weights ({EMBEDDED_POOL_MEMORY} for the embedded model)",
    )
    group.add_argument(
        "--swap-memory",
        type=memory_size,
        metavar="SIZE",
        help="memory beside the pool that requests which give way are copied to; default: none",
    )
    group.add_argument(
        "--preemption",
        choices=("auto", "swap", "recompute"),
        help="how requests give way; default: auto, swap where that costs less",
    )
    group.add_argument("--block-size", type=positive, metavar="TOKENS", help="default: 16")
    group.add_argument("--dtype", choices=("auto", "bfloat16", "float32"))
    group.add_argument("--backend", choices=("cpu", "reference", "triton", "flash"))
    group.add_argument(
        "--isa",
        choices=("auto", "avx512_bf16", "avx512", "avx2", "portable"),
        help="instruction set of the CPU kernels; default: auto, the fastest here, by measurement "
        "where that is in doubt",
    )
    group.add_argument(
        "--quantize",
        choices=("int8", "int4", "int4-32", "int4-128"),
        help="linears of 8-bit or 4-bit weights (in groups of 64, 32 or 128 inputs), with 8-bit "
        "activations",
    )
    computing = group.add_mutually_exclusive_group()
    computing.add_argument(
        "--cpus",
        metavar="LIST",
        help="CPUs that the workers divide among them, such as 0-3,6; default: auto, all",
    )
    computing.add_argument(
        "--threads", type=positive, metavar="N", help="per worker, on any CPU, none divided"
    )
    group.add_argument(
        "--max-gap-ms",
        type=_milliseconds,
        metavar="MS",
        help="from token to token of decoding streams, up to which prompts get their CPUs too; "
        "0: never; default: 100",
    )
    group.add_argument(
        "--weights-cache",
        metavar="DIR",
        help="where packed weights are kept, or none; default: ~/.cache/quire",
    )
    group.add_argument(
        "--max-model-len",
        type=positive,
        metavar="TOKENS",
        help="longest prompt + generation; default: the model's context",
    )
    group.add_argument("--max-num-seqs", type=positive, metavar="N", help="per decode worker")
    group.add_argument(
        "--park-window",
        type=_seconds,
        metavar="SECONDS",
        help="how long decode workers keep sequences whose gateway is gone; default: 10",
    )
    group.add_argument("--max-num-batched-tokens", type=positive, metavar="N", help="per step")


def _add_network(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("network")
    group.add_argument(
        "--host", default=DEFAULT_HOST, help="where the gateway listens; %(default)s"
    )
    group.add_argument(
        "--grpc-port",
        type=_port,
        default=DEFAULT_GRPC_PORT,
        metavar="PORT",
        help="%(default)s; 0 takes a free one",
    )
    group.add_argument(
        "--http-port",
        type=_port,
        default=DEFAULT_HTTP_PORT,
        metavar="PORT",
        help="%(default)s; 0 takes a free one",
    )
    group.add_argument(
        "--operations-port",
        type=_port,
        metavar="PORT",
        help="serve drain, scale, audit and the like on this port of 127.0.0.1 too; default: only "
        "on a socket of this user",
    )
    group.add_argument(
        "--allowed-hosts",
        metavar="LIST",
        help="hosts that HTTP requests may be for, such as localhost,*.example.com; default: any",
    )
    group.add_argument(
        "--redis-url",
        metavar="URL",
        help="redis://, rediss:// or unix://; default: an embedded Valkey",
    )
    group.add_argument(
        "--client-priority",
        action="store_true",
        help="requests may set a priority; without, one other than 0 is refused",
    )
    group.add_argument(
        "--report-cached-tokens",
        action="store_true",
        help="tell every client how many of its prompt's tokens were cached, by whomever; default: "
        "only one with a cache_salt",
    )
    group.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")


def run_serve(args: argparse.Namespace) -> int:
    serve(_options(args), args.run_root)
    return 0


def run_down(args: argparse.Namespace) -> int:
    run = stop_run(args.run_root, args.grpc_port)
    print(f"the run on port {run.grpc_port} (pid {run.pid}) has ended")
    return 0


def _options(args: argparse.Namespace) -> ServeOptions:
    default_memory = EMBEDDED_POOL_MEMORY if args.model == EMBEDDED else None
    model = find_model(args.model)
    check_model(model)
    return ServeOptions(
        model=model.directory,
        model_name=args.served_model_name or model.name,
        num_prefill=args.prefill,
        num_decode=args.decode,
        num_gateways=args.gateways,
        host=args.host,
        grpc_port=args.grpc_port or free_port(args.host),
        http_port=args.http_port or free_port(args.host),
        operations_port=args.operations_port,
        allowed_hosts=args.allowed_hosts,
        redis_url=args.redis_url,
        pool_memory=args.pool_memory or default_memory,
        swap_memory=args.swap_memory,
        preemption=args.preemption,
        block_size=args.block_size,
        dtype=args.dtype,
        backend=args.backend,
        isa=args.isa,
        quantize=args.quantize,
        cpus=args.cpus,
        max_gap_ms=args.max_gap_ms,
        threads=args.threads,
        weights_cache=args.weights_cache,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        park_window_s=args.park_window,
        client_priority=args.client_priority,
        report_cached_tokens=args.report_cached_tokens,
        log_level=args.log_level,
    )


def _milliseconds(text: str) -> float:
    return _duration(text, "milliseconds")


def _seconds(text: str) -> float:
    return _duration(text, "seconds")


def _duration(text: str, unit: str) -> float:
    try:
        duration = float(text)
    except ValueError:
        duration = math.nan
    if not 0 <= duration < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of {unit}")
    return duration


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return int(text)
