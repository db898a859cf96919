"""`quire advise block-size`: recommends a setting for a recorded workload.

A separate process, `python -m advisor`, does the work, because this package imports
neither PyTorch nor the block store.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from quire.cli.terminal import Columns, Commands, add_command, memory_size, positive, print_table
from quire.supervisor.model_source import EMBEDDED, find_model

_ADVISOR_FLAGS = (
    *("workload", "pool-memory", "dtype", "backend", "threads", "requests"),
    *("redis-url", "weights-cache"),
)
"""Flags that are also flags of `python -m advisor`."""

Costs = dict[str, Any]
"""The costs of one block size, as `advisor` prints them."""

_COLUMNS: Columns[Costs] = {
    "BLOCK SIZE": lambda size: size["block_size"],
    "KV": lambda size: f"{size['utilization']:6.1%}",
    "TAIL": lambda size: f"{size['tail']:6.1%}",
    "AHEAD": lambda size: f"{size['look_ahead']:6.1%}",
    "AT ONCE": lambda size: f"{size['num_at_once']:7.1f}",
    "BLOCKS": lambda size: f"{size['blocks_per_request']:6.1f}",
    "CALLS/TOKEN": lambda size: f"{size['store_calls_per_token']:11.3f}",
    "STORE us/TOKEN": lambda size: f"{size['store_us_per_token']:14.1f}",
    "PREFIX LOST": lambda size: f"{size['lost_tokens']:11.1f}",
    "ATTENTION us": lambda size: f"{size['attention_us']:12.1f}",
    "LEFT": lambda size: f"{size['left']:6.1%}",
}


def add_commands(commands: Commands) -> None:
    advise = commands.add_parser("advise", help="recommend settings for a recorded workload")
    subjects = advise.add_subparsers(title="settings", metavar="SETTING", required=True)
    command = add_command(
        subjects,
        "block-size",
        block_size,
        help_text="recommend the --block-size for a recorded workload, with reasons",
    )
    command.add_argument(
        "--workload",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSON lines of num_prompt_tokens and num_generated_tokens, or a gateway's JSON log",
    )
    command.add_argument(
        "--model", default=EMBEDDED, metavar="DIR|ID", help="as for `quire serve`; %(default)s"
    )
    command.add_argument(
        "--pool-memory",
        type=memory_size,
        metavar="SIZE",
        help="the pool's KV memory; default: room for 64 average requests",
    )
    command.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto")
    command.add_argument("--backend", choices=("cpu", "reference"), default="cpu")
    command.add_argument(
        "--threads", type=positive, default=1, metavar="N", help="threads of a worker; %(default)s"
    )
    command.add_argument(
        "--requests",
        type=positive,
        default=2000,
        metavar="N",
        help="use the last N requests of the workload; %(default)s",
    )
    command.add_argument(
        "--redis-url",
        metavar="URL",
        help="an idle Redis or Valkey to time, of no deployment; default: an embedded Valkey",
    )
    command.add_argument(
        "--weights-cache", metavar="DIR", help="as for `quire serve`; default: ~/.cache/quire"
    )
    command.add_argument("--json", action="store_true", help="print JSON for scripts")


def block_size(args: argparse.Namespace) -> int:
    model = find_model(args.model)
    options = {name: getattr(args, name.replace("-", "_")) for name in _ADVISOR_FLAGS}
    options["model"] = model.directory
    found = _run_advisor({name: str(value) for name, value in options.items() if value is not None})
    if "error" in found:
        print(f"quire: {found['error']}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(found))
        return 0
    print_table(_COLUMNS, found["sizes"])
    print(f"\n--block-size {found['block_size']}")
    for text in (*found["reasons"], *found["notes"]):
        print(f"  {text}")
    return 0


def _run_advisor(options: dict[str, str]) -> dict[str, Any]:
    # -P: a directory `services` in the user's working directory must not hide Quire's package.
    command = [sys.executable, "-P", "-m", "advisor"]
    command += [f"--{name}={value}" for name, value in options.items()]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        return {"error": f"advisor ended with status {done.returncode}, without an answer"}
    return found
