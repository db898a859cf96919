"""`quire explain`: tells what happened to a request, or what would happen to one now."""

import json
import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, BadParameter, Option

from quire.cli.flags import Json, OperationsFlags
from quire.errors import NotFound, QuireError, Unreachable
from quire.messages import Request
from quire.types import ChatMessage, Prompt, Sampling


def explain(
    gateway: OperationsFlags,
    request_id: Annotated[
        str | None, Argument(metavar="REQUEST_ID", help="the request's id, or its answer's")
    ] = None,
    prompt: Annotated[
        Path | None,
        Option(metavar="FILE", help="tell what would happen to this user's message; - is stdin"),
    ] = None,
    raw: Annotated[bool, Option("--raw", help="the file is a text, not a message")] = False,
    model: Annotated[str, Option(metavar="NAME", help="needed if several are served")] = "",
    max_tokens: Annotated[int | None, Option(metavar="N", help="of the answer")] = None,
    cache_salt: Annotated[str, Option(metavar="SALT", help="of the request")] = "",
    as_json: Json = False,
) -> None:
    """Tell what happened to a request, in sentences.

    With --prompt nothing is sent to the model: it tells what would happen now.

    A gateway remembers the last 4,096 requests that it served. All gateways of the run are asked,
    or the gateways that --address HOST:PORT,HOST:PORT names. The key of a user sees the user's own.
    """
    if (request_id is None) == (prompt is None):
        raise BadParameter("give a request's id, or a prompt's file with --prompt")
    about: str | Request = request_id or ""
    if prompt is not None:
        try:
            text = sys.stdin.read() if str(prompt) == "-" else prompt.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise BadParameter(f"{prompt} cannot be read as text: {error}") from error
        said: Prompt = text if raw else [ChatMessage("user", text)]
        about = Request(said, Sampling(max_tokens=max_tokens), model, cache_salt=cache_salt)
    found = _told_by_any(gateway, about)
    print(json.dumps(found) if as_json else "\n".join(found))


def _told_by_any(gateway: OperationsFlags, about: str | Request) -> tuple[str, ...]:
    """The story by the first gateway that knows the request. Raises the last gateway's error if
    none does."""
    failure: QuireError | None = None
    for address in (addresses := gateway.addresses).split(","):
        try:
            with gateway.client(address) as client:
                return client.explain(about)
        except (NotFound, Unreachable) as error:
            failure = error
    assert failure is not None
    raise type(failure)(f"{failure}; asked: {addresses}", failure.code)
