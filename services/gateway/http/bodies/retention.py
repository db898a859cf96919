"""The fields by which a body asks the cache to retain prefixes: Anthropic's `cache_control`, of
messages and their parts, and OpenAI's `prompt_cache_key` and `prompt_cache_retention`."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from services.gateway.api import ChatMessage, RetainDirective

DAY_S = 24 * 3600
_TTLS = {"5m": 300, "1h": 3600, "24h": DAY_S}


def parse_ttl(value: Any) -> int:
    """Seconds: a number, or 5m, 1h, 24h."""
    if isinstance(value, str) and value in _TTLS:
        return _TTLS[value]
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise ValueError('a ttl is a number of seconds, or "5m", "1h" or "24h"')


def parse_cache_control(value: Any) -> int | None:
    """The seconds of a breakpoint; None if there is none."""
    match value:
        case None | {"type": None}:
            return None
        case {} if not value:
            return None
        case {"type": "ephemeral"}:
            return parse_ttl(value.get("ttl") or "5m")
    raise ValueError('cache_control is {"type": "ephemeral", "ttl": "5m"} or "1h"')


Ttl = Annotated[
    int,
    PlainValidator(parse_ttl),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"enum": [*_TTLS]}]}),
]
CacheControl = Annotated[
    int | None,
    PlainValidator(parse_cache_control),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "null"}]}),
]

Breakpoint = tuple[int | None, int]
"""The number of characters of a message's text before a breakpoint, None for the whole message; and
the seconds for which to retain the chat up to there."""


def breakpoints(
    messages: Sequence[ChatMessage], places: Sequence[Sequence[Breakpoint]]
) -> Iterator[RetainDirective]:
    """The directives of a chat's breakpoints, which stand at the `places` of each message."""
    for number, (message, own) in enumerate(zip(messages, places, strict=True)):
        for num_chars, ttl_s in own:
            last = message
            if num_chars is not None and num_chars < len(message.content):
                last = replace(message, content=message.content[:num_chars], fields={})
            yield RetainDirective(ttl_s, until=(*messages[:number], last))
