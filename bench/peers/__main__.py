"""Set the peers up, or run one alone.

    python -m bench.peers setup                        # all of them
    python -m bench.peers setup vllm openvino
    python -m bench.peers engine llama.cpp --model DIR --decode 1 8 16 --prefill 512 [--dtype int8]
    python -m bench.peers serve vllm --model DIR --port 8100 [--dtype int8]

DIR is a checkpoint in Hugging Face's format, such as `bench/make_checkpoint.py` writes. The first
use of a checkpoint converts it, where a peer wants its own form.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from bench.peers.peer import Dtype, EngineRun, Peer, ServerOptions
from bench.peers.registry import PEERS


def setup(options: argparse.Namespace) -> None:
    for name in options.peers or PEERS:
        print(f"{name}: setting up", flush=True)
        PEERS[name].setup()
    print("ready")


def engine(options: argparse.Namespace) -> None:
    peer = _peer(options)
    run = EngineRun(
        tuple(options.decode),
        tuple(options.prefill),
        options.prompt,
        options.tokens,
        options.threads,
        options.repeats,
    )
    for figure in peer.measure(peer.prepare(options.model, options.dtype), options.dtype, run):
        print(f"{figure.kind} {figure.size}: {figure.tokens_per_s:,.1f} tok/s")


def serve(options: argparse.Namespace) -> None:
    peer = _peer(options)
    model = peer.prepare(options.model, options.dtype)
    command = peer.server(model, options.dtype, ServerOptions(options.port, options.threads))
    os.execvpe(command.arguments[0], command.arguments, command.full_environment)


def _peer(options: argparse.Namespace) -> Peer:
    peer = PEERS[options.peer]
    if not peer.is_ready:
        raise SystemExit(f"{peer.name} is not set up: python -m bench.peers setup {peer.name}")
    if options.dtype not in peer.formats:
        raise SystemExit(f"{peer.name} has no {options.dtype} here: {', '.join(peer.formats)}")
    return peer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(required=True)

    def command(run: Callable[[argparse.Namespace], None]) -> argparse.ArgumentParser:
        added = commands.add_parser(run.__name__)
        added.set_defaults(run=run)
        return added

    command(setup).add_argument("peers", nargs="*", metavar="PEER", help=", ".join(PEERS))
    for added in (command(engine), command(serve)):
        added.add_argument("peer", choices=list(PEERS))
        added.add_argument("--model", type=Path, required=True, metavar="DIR")
        added.add_argument("--dtype", choices=get_args(Dtype), default="bfloat16")
        added.add_argument("--threads", type=int, default=os.cpu_count())
    serving, running = commands.choices["serve"], commands.choices["engine"]
    serving.add_argument("--port", type=int, default=8100)
    running.add_argument("--decode", type=int, nargs="+", default=[])
    running.add_argument("--prefill", type=int, nargs="+", default=[])
    running.add_argument("--prompt", type=int, default=128)
    running.add_argument("--tokens", type=int, default=128)
    running.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
