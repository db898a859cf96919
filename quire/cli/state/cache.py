"""`quire cache`: retains prefixes in the cache of a deployment, lists them and drops them."""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

from typer import Argument, BadParameter, Option, Typer

from quire.cli.calls import HttpFlags, http_call
from quire.cli.flags import Json, with_flags
from quire.cli.output import Columns, print_table
from quire.errors import QuireError

app = Typer(
    help="Keep prefixes in the cache for a time.", no_args_is_help=True, add_completion=False
)

_WARMING_S = 600.0

_COLUMNS: Columns[dict[str, Any]] = {
    "NAME": lambda prefix: prefix["name"],
    "TENANT": lambda prefix: prefix["tenant"],
    "MODEL": lambda prefix: prefix["model"],
    "TOKENS": lambda prefix: prefix["retained_tokens"],
    "CACHED": lambda prefix: "" if prefix["cached_tokens"] is None else prefix["cached_tokens"],
    "ENDS IN": lambda prefix: _duration(prefix["expires_at"] - time.time()),
}
_Name = Annotated[str, Argument(metavar="NAME", help="of the prefix")]


@dataclass(frozen=True)
class PrefixFlags:
    """The prefix to retain, and its time."""

    prompt: Annotated[
        str, Option(metavar="FILE", help="a file with the text; - is standard input")
    ] = ""
    messages: Annotated[
        Path | None, Option(metavar="FILE", help="a JSON file with the first messages of a chat")
    ] = None
    ttl: Annotated[str, Option(metavar="TIME", help="5m, 1h, 24h, or a number of seconds")] = "1h"
    model: Annotated[str, Option(metavar="NAME", help="needed if several models are served")] = ""
    cache_salt: Annotated[str, Option(metavar="SALT", help="the salt of the requests")] = ""

    def body(self) -> dict[str, Any]:
        if bool(self.prompt) == (self.messages is not None):
            raise BadParameter("one of --prompt and --messages is needed")
        ttl = int(self.ttl) if self.ttl.isdecimal() else self.ttl
        body = {"model": self.model or None, "cache_salt": self.cache_salt or None, "ttl": ttl}
        try:
            if self.messages is not None:
                return {**body, "messages": json.loads(self.messages.read_text())}
            text = sys.stdin.read() if self.prompt == "-" else Path(self.prompt).read_text()
        except (OSError, ValueError) as error:
            raise BadParameter(str(error)) from error
        return {**body, "prompt": text}


def list_prefixes(gateway: HttpFlags, as_json: Json = False) -> None:
    """List the prefixes that are retained."""
    with http_call(gateway, "/v1/cache") as answer:
        data = json.load(answer)["data"]
    if as_json:
        print(json.dumps(data))
    else:
        print_table(_COLUMNS, data)


def warm(name: _Name, prefix: PrefixFlags, gateway: HttpFlags, as_json: Json = False) -> None:
    """Compute a prefix if it is not cached, and retain it."""
    _retain({"name": name, **prefix.body()}, gateway, as_json)


def retain(name: _Name, prefix: PrefixFlags, gateway: HttpFlags, as_json: Json = False) -> None:
    """Retain what is cached of a prefix, and what requests compute of it later."""
    _retain({"name": name, "warm": False, **prefix.body()}, gateway, as_json)


def _retain(body: dict[str, Any], gateway: HttpFlags, as_json: bool) -> None:
    with http_call(gateway, "/v1/cache", method="POST", body=body, timeout_s=_WARMING_S) as answer:
        found = json.load(answer)
    if as_json:
        print(json.dumps(found))
        return
    if found["status"] == "rejected":
        raise QuireError(f"{found['name']} is not retained: {found['reason']}", "rejected")
    tokens = f"{found['retained_tokens']:,} of {found['asked_tokens']:,} tokens"
    print(
        f"{found['name']}: {found['status']}, {tokens} are retained for {_duration(found['ttl'])}"
    )
    details = (found["usage"] or {}).get("prompt_tokens_details")
    if details:
        read, written = details["cached_tokens"], details["cache_write_tokens"]
        print(f"{read:,} tokens were cached, {written:,} were computed into the cache")
    if found["reason"]:
        print(found["reason"])


def drop(
    name: _Name,
    gateway: HttpFlags,
    tenant: Annotated[str, Option(metavar="NAME", help="whose prefix; for operators")] = "",
) -> None:
    """No longer retain a prefix: its blocks are evicted as any others."""
    query = f"?tenant={quote(tenant)}" if tenant else ""
    with http_call(gateway, f"/v1/cache/{quote(name, safe='')}{query}", method="DELETE"):
        print(f"{name} is not retained any more")


def _duration(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{max(0.0, seconds):.0f} s"


app.command("list")(with_flags(list_prefixes))
app.command()(with_flags(warm))
app.command()(with_flags(retain))
app.command()(with_flags(drop))
