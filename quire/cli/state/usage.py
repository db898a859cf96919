"""`quire usage`: what tenants used of a deployment in the last hours."""

import json
import re
import time
from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any

from typer import BadParameter, Option

from quire.cli.calls import HttpFlags, http_call
from quire.cli.flags import Json
from quire.cli.output import print_table

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def usage(
    gateway: HttpFlags,
    since: Annotated[
        str, Option(metavar="TIME", help="30m, 1h ... or a time such as 2026-11-28T09:00")
    ] = "1h",
    as_json: Json = False,
) -> None:
    """Show how long each tenant used the blocks of the pools, and its tokens."""
    with http_call(gateway, f"/v1/usage?since={_unix_s(since)}") as answer:
        found = json.load(answer)
    if as_json:
        print(json.dumps(found))
        return
    whole = sum(each["block_seconds"] for each in found["data"]) or 1.0
    columns: dict[str, Callable[[dict[str, Any]], object]] = {
        "TENANT": lambda used: used["tenant"],
        "BLOCK SECONDS": lambda used: round(used["block_seconds"]),
        "OF ALL": lambda used: f"{used['block_seconds'] / whole:.1%}",
        "PROMPT": lambda used: used["prompt_tokens"],
        "CACHED": lambda used: used["cached_tokens"],
        "GENERATED": lambda used: used["completion_tokens"],
    }
    if len(found["data"]) < 2:  # others are hidden, or there are none
        del columns["OF ALL"]
    since = f"since {datetime.fromtimestamp(found['since']):%Y-%m-%d %H:%M}"
    if not found["data"]:
        print(f"no usage {since}; services write theirs every few seconds")
        return
    print(since)
    print_table(columns, found["data"])


def _unix_s(text: str) -> int:
    if ago := re.fullmatch(r"(\d+)([smhd])", text):
        return int(time.time()) - int(ago[1]) * _UNITS[ago[2]]
    try:
        return int(datetime.fromisoformat(text).timestamp())
    except ValueError as error:
        raise BadParameter(f"{text} is neither a duration such as 1h nor a time") from error
