"""JSON schemas, with the options of llguidance that they are compiled with."""

from typing import Any

OPTIONS = "x-guidance"
"""The schema's field that has options of llguidance."""

_WHITESPACE = r"[ \t]{1,4}|\r?\n[ \t]{0,40}"
"""Between two tokens of JSON: what a pretty printer writes. Small models would else write white
space until `max_tokens` ends the text."""


def with_options(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, with the white space above unless its own options say another."""
    options = schema.get(OPTIONS, {})
    if isinstance(options, dict) and not options.keys() & {
        "whitespace_flexible",
        "whitespace_pattern",
    }:
        return {**schema, OPTIONS: {**options, "whitespace_pattern": _WHITESPACE}}
    return schema
