"""JSON schemas, with the options of llguidance that they are compiled with."""

from typing import Any

OPTIONS = "x-guidance"
"""The schema's field that has options of llguidance."""

_WHITESPACE = r"[ \t]{1,4}|\r?\n[ \t]{0,40}"
"""Between two tokens of JSON: what a pretty printer writes. Small models would else write white
space until `max_tokens` ends the text."""


_FORMATS = {
    *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6"),
    *("uuid", "uri"),
}
"""The formats that llguidance enforces. Any other is an annotation, as JSON Schema says."""

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_MOST = (1 << 63) - 1024
"""llguidance takes no larger bound. A larger one is that of a type, such as int64 or float64, and
becomes this one: then every text that the form allows is still within the schema's bounds."""

_ONE = ("items", "additionalItems", "additionalProperties", "contains", "not", "if", "then", "else")
_MANY = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")


def _asking(schema: Any) -> Any:
    """The schema without keywords that ask for nothing."""
    if not isinstance(schema, dict):
        return schema
    kept = {name: value for name, value in schema.items() if not _asks_nothing(name, value)}
    for name, value in kept.items():
        if name in _BOUNDS:
            kept[name] = _bound(name, value)
        elif name in _ONE and isinstance(value, dict):
            kept[name] = _asking(value)
        elif name in _MANY and isinstance(value, list):
            kept[name] = [_asking(each) for each in value]
        elif name in _NAMED and isinstance(value, dict):
            kept[name] = {key: _asking(each) for key, each in value.items()}
    return kept


def _asks_nothing(name: str, value: Any) -> bool:
    if name == "uniqueItems":
        return value is False
    if name == "format":
        return isinstance(value, str) and value not in _FORMATS
    return False


def _bound(name: str, value: Any) -> Any:
    """The bound, or the largest one that llguidance takes if it is larger."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return max(value, -_MOST) if "inimum" in name else min(value, _MOST)


def with_options(schema: dict[str, Any]) -> dict[str, Any]:
    """What the schema asks for, with the white space above unless its own options say another."""
    schema = _asking(schema)
    options = schema.get(OPTIONS, {})
    if isinstance(options, dict) and not options.keys() & {
        "whitespace_flexible",
        "whitespace_pattern",
    }:
        return {**schema, OPTIONS: {**options, "whitespace_pattern": _WHITESPACE}}
    return schema
