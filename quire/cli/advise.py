"""`quire advise block-size`: recommends a setting for a recorded workload."""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Option

from quire.choices import Dtype
from quire.cli.flags import Json, with_flags
from quire.cli.output import Columns, print_table
from quire.sizes import memory_size
from quire.supervisor.model_source import DEMO, find_model

Costs = dict[str, Any]
"""The costs of one block size, as `advisor.advice` returns them."""

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


app = typer.Typer(help="Recommend settings for a recorded workload.", add_completion=False)


@dataclass(frozen=True)
class AdvisorFlags:
    """The options of `advisor.advice`."""

    workload: Annotated[
        Path,
        Option(
            metavar="FILE",
            help="JSON lines of num_prompt_tokens and num_generated_tokens, or a gateway's JSON "
            "log",
        ),
    ]
    model: Annotated[str, Option(metavar="DIR|ID", help="as for `quire serve`")] = DEMO
    pool_memory: Annotated[
        str | None,
        Option(
            metavar="SIZE",
            parser=memory_size,
            help="the pool's KV memory; default: room for 64 average requests",
        ),
    ] = None
    dtype: Dtype = "auto"
    backend: Literal["cpu", "reference"] = "cpu"
    threads: Annotated[int, Option(min=1, metavar="N", help="threads of a worker")] = 1
    requests: Annotated[
        int, Option(min=1, metavar="N", help="use the last N requests of the workload")
    ] = 2000
    weights_cache: Annotated[str, Option(metavar="DIR", help="as for `quire serve`")] = (
        "~/.cache/quire"
    )


def block_size(flags: AdvisorFlags, as_json: Json = False) -> None:
    """Recommend the --block-size for a recorded workload, with reasons."""
    source = find_model(flags.model)
    from advisor.advice import recommend  # imports PyTorch, which takes seconds

    options = asdict(flags) | {"model": Path(source.directory)}
    found = recommend(**options, show_progress=_show_progress)
    _show_progress("")
    if as_json:
        print(json.dumps(found))
        return
    print_table(_COLUMNS, found["sizes"])
    print(f"\n--block-size {found['block_size']}")
    for text in (*found["reasons"], *found["notes"]):
        print(f"  {text}")


def _show_progress(text: str) -> None:
    """Show progress on a terminal; an empty text clears the line."""
    if sys.stderr.isatty():
        print(f"\r{text:<78}\r", end="", file=sys.stderr, flush=True)


app.command("block-size")(with_flags(block_size))
# Without a callback, typer takes the only command for the group itself.
app.callback()(lambda: None)
