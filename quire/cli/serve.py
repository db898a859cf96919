"""`quire serve` and `quire down`: start and end a whole deployment on this host."""

import argparse
import math
from dataclasses import fields
from pathlib import Path

from quire.cli.terminal import Commands, add_command, memory_size, positive
from quire.supervisor import RUNS, ServeOptions, serve, stop_run
from quire.supervisor.model_source import EMBEDDED, find_model
from quire.supervisor.options import DEFAULT_GRPC_PORT, DEFAULT_HOST, DEFAULT_HTTP_PORT
from quire.supervisor.run_directory import free_port

EMBEDDED_POOL_MEMORY = "256MiB"
"""Enough for hundreds of chats with the embedded model. The default for other models, half of the
free memory, would take longer to allocate than the embedded model takes to load."""


def add_commands(commands: Commands) -> None:
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
        dest="model_name",
        metavar="NAME",
        help="the model's name for clients; default: its id, or the name of the directory or file",
    )
    for flag, help_text in (
        ("prefill", "prefill workers"),
        ("decode", "decode workers"),
        ("gateways", "gateways, each on the next ports"),
    ):
        command.add_argument(
            f"--{flag}", dest=f"num_{flag}", type=positive, default=1, metavar="N", help=help_text
        )
    _add_engine(command)
    _add_network(command)
    _add_run_root(command)
    down = add_command(commands, "down", run_down, help_text="end a `quire serve` of this user")
    down.add_argument(
        "--grpc-port", type=_port, metavar="PORT", help="needed if several runs exist"
    )
    _add_run_root(down)


def _add_run_root(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--run-root",
        type=Path,
        default=RUNS,
        metavar="DIR",
        help="a tmpfs for the directories and pools of runs; %(default)s",
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
        help="memory beside the pool to which preempted requests are copied; default: none",
    )
    group.add_argument(
        "--preemption",
        choices=("auto", "swap", "recompute"),
        help="how requests are preempted; default: auto, swap if that costs less",
    )
    group.add_argument("--block-size", type=positive, metavar="TOKENS", help="default: 16")
    group.add_argument("--dtype", choices=("auto", "bfloat16", "float32"))
    group.add_argument("--backend", choices=("cpu", "reference", "triton", "flash"))
    group.add_argument(
        "--isa",
        choices=("auto", "amx", "avx512_bf16", "avx512", "avx2", "portable"),
        help="instruction set of the CPU kernels; default: auto, the fastest one here, measured if "
        "in doubt",
    )
    group.add_argument(
        "--quantize",
        choices=("int8", "int4", "int4-32", "int4-128"),
        help="run linears with 8-bit or 4-bit weights (groups of 64, 32 or 128 inputs) and 8-bit "
        "activations",
    )
    group.add_argument(
        "--kv-dtype",
        choices=("auto", "int8"),
        help="keys and values; default: auto, as --dtype; int8: half of bfloat16's memory",
    )
    computing = group.add_mutually_exclusive_group()
    computing.add_argument(
        "--cpus",
        metavar="LIST",
        help="CPUs that the workers share, such as 0-3,6; default: auto, one of each core",
    )
    computing.add_argument(
        "--threads", type=positive, metavar="N", help="threads of each worker, on any CPU"
    )
    group.add_argument(
        "--numa",
        choices=("auto", "off"),
        help="auto: on a host with several NUMA nodes, threads and memory of a worker are on nodes "
        "of its own; off: all CPUs are one node; default: auto",
    )
    group.add_argument(
        "--max-gap-ms",
        type=_milliseconds,
        metavar="MS",
        help="the inter-token latency up to which prompts may use the CPUs of decode workers too; "
        "0: never; default: 100",
    )
    group.add_argument(
        "--weights-cache",
        metavar="DIR",
        help="directory of packed weights, or none; default: ~/.cache/quire",
    )
    group.add_argument(
        "--max-model-len",
        type=positive,
        metavar="TOKENS",
        help="longest prompt + generation; default: the model's context",
    )
    group.add_argument("--max-num-seqs", type=positive, metavar="N", help="of one decode worker")
    group.add_argument(
        "--park-window",
        dest="park_window_s",
        type=_seconds,
        metavar="SECONDS",
        help="how long decode workers keep requests whose gateway is gone; default: 10",
    )
    group.add_argument("--max-num-batched-tokens", type=positive, metavar="N", help="of one step")


def _add_network(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("network")
    group.add_argument(
        "--host", default=DEFAULT_HOST, help="address on which the gateways listen; %(default)s"
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
        help="serve operations (drain, scale, audit ...) on this port of 127.0.0.1 too; default: "
        "only on a socket of this user",
    )
    group.add_argument(
        "--allowed-hosts",
        metavar="LIST",
        help="hosts that HTTP requests may name, such as localhost,*.example.com; default: any",
    )
    group.add_argument(
        "--redis-url",
        metavar="URL",
        help="redis://, rediss:// or unix://; default: an embedded Valkey",
    )
    group.add_argument(
        "--client-priority",
        action="store_true",
        help="accept priorities from clients; without it, any priority other than 0 is refused",
    )
    group.add_argument(
        "--report-cached-tokens",
        action="store_true",
        help="report to every client how many of its prompt's tokens were cached; default: only to "
        "requests with a cache_salt",
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
    """The options of the run; each flag's destination is a field of `ServeOptions`."""
    model = find_model(args.model)
    default_memory = EMBEDDED_POOL_MEMORY if args.model == EMBEDDED else None
    values = {field.name: getattr(args, field.name) for field in fields(ServeOptions)}
    values |= {
        "model": model.directory,
        "model_name": args.model_name or model.name,
        "grpc_port": args.grpc_port or free_port(args.host),
        "http_port": args.http_port or free_port(args.host),
        "pool_memory": args.pool_memory or default_memory,
    }
    return ServeOptions(**values)


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
