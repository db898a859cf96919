"""Calls of a gateway's HTTP port."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Annotated, Any, cast
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from typer import Option

from quire.addresses import http_url
from quire.cli.flags import AccessFlags
from quire.errors import NotAllowed, QuireError, UnreachableUrl


@dataclass(frozen=True)
class HttpFlags(AccessFlags):
    """The HTTP port of the gateway to call."""

    url: Annotated[
        str,
        Option(
            metavar="URL", envvar="QUIRE_URL", parser=http_url, help="the HTTP port of a gateway"
        ),
    ] = "http://127.0.0.1:8000"


@contextmanager
def http_call(
    flags: HttpFlags,
    path: str,
    *,
    method: str = "GET",
    body: Mapping[str, Any] | None = None,
    timeout_s: float = 5,
) -> Iterator[HTTPResponse]:
    """Yields the answer to a call. Raises UnreachableUrl if the gateway does not answer, and
    QuireError if it refuses."""
    headers = {"Authorization": f"Bearer {flags.api_key}"} if flags.api_key else {}
    data = None if body is None else json.dumps(body).encode()
    if data is not None:
        headers["Content-Type"] = "application/json"
    url = f"{flags.url.rstrip('/')}{path}"
    request = Request(url, data, headers, method=method)
    tls = flags.tls_files.context() if flags.tls_files else None
    try:
        with urlopen(request, timeout=timeout_s, context=tls) as answer:
            yield cast(HTTPResponse, answer)
    except HTTPError as error:
        refused = NotAllowed if error.code == 401 else QuireError
        raise refused(_text_of(error), "refused") from error
    except (URLError, HTTPException, OSError, ValueError) as error:
        text = f"no gateway answers at {flags.url}: {getattr(error, 'reason', error)}"
        raise UnreachableUrl(text, "unreachable") from error


def _text_of(error: HTTPError) -> str:
    text = error.read().decode(errors="replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text
