"""Reads the feed of a gateway's dashboard: a whole document, then JSON merge patches (RFC 7386)."""

import json
from collections.abc import Iterator, Mapping
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from quire.connections import Tls
from quire.errors import NotAllowed, QuireError, UnreachableUrl

Document = dict[str, Any]

_SILENCE_S = 5.0
"""The gateway sends two updates a second."""


def merge(target: Document, patch: Mapping[str, Any]) -> Document:
    """Apply a merge patch to a document: null removes a key."""
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, Mapping):
            before = target.get(key)
            target[key] = merge(before if isinstance(before, dict) else {}, value)
        else:
            target[key] = value
    return target


def documents(url: str, api_key: str | None, tls: Tls | None) -> Iterator[Document]:
    """The document after each update. Raises UnreachableUrl if the gateway does not answer, and
    QuireError if it refuses."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = Request(f"{url.rstrip('/')}/dashboard/feed", headers=headers)
    try:
        with urlopen(request, timeout=_SILENCE_S, context=tls.context() if tls else None) as answer:
            document: Document = {}
            for name, data in _events(answer):
                document = merge({} if name == "whole" else document, json.loads(data))
                yield document
    except HTTPError as error:
        refused = NotAllowed if error.code == 401 else QuireError
        raise refused(_problem(error), "refused") from error
    except (URLError, HTTPException, OSError) as error:
        reason = getattr(error, "reason", error)
        raise UnreachableUrl(f"no gateway answers at {url}: {reason}", "unreachable") from error


def _events(answer: HTTPResponse) -> Iterator[tuple[str, str]]:
    """The name and the data of each event of a stream."""
    fields: dict[str, str] = {}
    for line in answer:
        text = line.decode().rstrip("\r\n")
        if text:
            name, _, value = text.partition(":")
            fields[name] = value.strip()
        elif fields:
            yield fields.get("event", ""), fields.get("data", "{}")
            fields = {}


def _problem(error: HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{error.url}: HTTP {error.code} {error.reason}"
