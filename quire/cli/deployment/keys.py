"""`quire keys`: makes, lists and revokes API keys in a key file."""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, BadParameter, Option

from quire.api_keys import (
    MIN_CHARS,
    ApiKey,
    Role,
    changed_keys,
    hash_key,
    make_key,
    new_key,
    read_keys,
)
from quire.cli.flags import Json, with_flags
from quire.cli.output import Columns, print_table
from quire.errors import QuireError

app = typer.Typer(help="Make, list and revoke API keys in a key file.", add_completion=False)

File = Annotated[
    Path,
    Option("--file", metavar="FILE", envvar="QUIRE_API_KEYS_FILE", help="the key file, in JSON"),
]
_Limit = Annotated[int | None, Option(metavar="N", min=1, show_default=False)]

_COLUMNS: Columns[ApiKey] = {
    "KEY": lambda key: key.name,
    "TENANT": lambda key: key.tenant,
    "ROLE": lambda key: key.role,
    "REQUESTS/MIN": lambda key: _limit(key.requests_per_minute),
    "TOKENS/MIN": lambda key: _limit(key.tokens_per_minute),
    "SEQUENCES": lambda key: _limit(key.max_concurrency),
    "MODELS": lambda key: "all" if key.models is None else " ".join(key.models),
}


@dataclass(frozen=True)
class KeyFlags:
    """The rights of a key's owner; each flag is a field of `ApiKey`."""

    tenant: Annotated[
        str | None, Option(metavar="NAME", help="shares cached prefixes; default: the key's name")
    ] = None
    role: Annotated[Role, Option(help="operators may also drain, scale and audit")] = "user"
    requests_per_minute: _Limit = None
    tokens_per_minute: _Limit = None
    max_concurrency: Annotated[
        int | None, Option(metavar="N", min=1, help="sequences at a time")
    ] = None
    max_sequences: Annotated[
        int, Option(metavar="N", min=1, help="limit of n and of beam widths")
    ] = 8
    models: Annotated[
        list[str] | None, Option("--model", metavar="NAME", help="may be repeated; default: all")
    ] = None
    retained_blocks: Annotated[
        int | None,
        Option(metavar="N", min=0, help="blocks of each pool that the tenant may retain"),
    ] = None
    priority_ceiling: Annotated[
        int, Option(metavar="N", help="the most urgent priority; lower is more urgent")
    ] = 0


def create(
    name: Annotated[str, Argument(metavar="NAME", help="the key's name, for logs")],
    file: File,
    limits: KeyFlags,
    as_json: Json = False,
) -> None:
    """Make a key, and show it once: the file has only its hash."""
    key = new_key()
    fields: dict[str, Any] = {
        field: value for field, value in asdict(limits).items() if value is not None
    }
    with changed_keys(file) as keys:
        if any(other.name == name for other in keys):
            raise QuireError(f"{file} has a key {name} already", "exists")
        made = make_key({"name": name, "hash": hash_key(key), **fields})
        keys.append(made)
    if as_json:
        typer.echo(f'{{"name": "{made.name}", "key": "{key}"}}')
        return
    print(key)
    print(f"quire: {name} has been added to {file}; its key is shown only now", file=sys.stderr)


def show(file: File, as_json: Json = False) -> None:
    """List the keys of a file, without their hashes."""
    keys = read_keys(file)
    if as_json:
        rows = ",".join(key.model_dump_json(exclude={"hash"}) for key in keys)
        print(f"[{rows}]")
    else:
        print_table(_COLUMNS, keys)


def revoke(name: Annotated[str, Argument(metavar="NAME")], file: File) -> None:
    """Remove a key; gateways refuse it within a second or two."""
    with changed_keys(file) as keys:
        left = [key for key in keys if key.name != name]
        if len(left) == len(keys):
            raise QuireError(f"{file} has no key {name}", "not_found")
        keys[:] = left
    print(f"{name} is revoked; its running requests continue to their end")


def hashed(
    file: Annotated[Path, Option("--file", metavar="FILE", help="has the key; -: the input")],
) -> None:
    """Print the hash of a key of your own, for a key file."""
    key = (sys.stdin.read() if str(file) == "-" else file.read_text()).strip()
    if len(key) < MIN_CHARS or not key.isascii() or any(map(str.isspace, key)):
        raise BadParameter(
            f"a key needs {MIN_CHARS} ASCII characters or more, all random and without spaces; "
            f"this one has {len(key)}"
        )
    print(hash_key(key))


def _limit(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


for _name, _command in (("create", create), ("list", show), ("revoke", revoke), ("hash", hashed)):
    app.command(_name)(with_flags(_command))
