"""JSON schemas, with the options of llguidance that they are compiled with."""

import math
from collections.abc import Iterator
from typing import Any

OPTIONS = "x-guidance"
"""The schema's field that has options of llguidance."""

_WHITESPACE = r"[ \t]{1,4}|\r?\n[ \t]{0,40}"
"""Between two tokens of JSON: what a pretty printer writes. Small models would else write white
space until `max_tokens` ends the text."""

_WHITESPACE_OPTIONS = ("whitespace_flexible", "whitespace_pattern")
"""The options that a request may have. Others switch keywords of the schema off."""

_FORMATS = {
    *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6"),
    *("uuid", "uri"),
}
"""The formats that llguidance enforces. Any other is an annotation, as JSON Schema says."""

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_MOST = (1 << 63) - 1024
_LEAST = 1e-30
"""llguidance takes no larger bound, and none nearer to 0. Such bounds are the limits of a type
like int64 or float64. Each becomes the next bound inside: then every text that the form allows is
still within the schema's bounds."""

_NAMED = ("$defs", "definitions", "properties", "patternProperties")
_MANY = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
_ONE = ("items", "additionalItems", "additionalProperties", "contains", "not", "if", "then", "else")


def subschemas(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas directly within a schema, with their paths."""
    for name, value in schema.items():
        parts: list[tuple[str, Any]] = []
        if name in _NAMED and isinstance(value, dict):
            parts = [(f"{name}.{key}", each) for key, each in value.items()]
        elif name in _MANY and isinstance(value, list):
            parts = [(f"{name}[{number}]", each) for number, each in enumerate(value)]
        elif name in _ONE:
            parts = [(name, value)]
        yield from ((path, each) for path, each in parts if isinstance(each, dict))


def with_options(schema: Any) -> dict[str, Any]:
    """The schema as llguidance takes it, with the white space above unless its options say another.
    Changes `schema`. Raises ValueError if it is none."""
    if schema is True:  # JSON Schema's name for "any value"
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError("a JSON schema is an object")
    given = schema.get(OPTIONS)
    options = given if isinstance(given, dict) else {}
    options = {name: options[name] for name in _WHITESPACE_OPTIONS if name in options}
    _rewrite(schema)
    return {**schema, OPTIONS: options or {"whitespace_pattern": _WHITESPACE}}


def _rewrite(schema: dict[str, Any]) -> None:
    """Leave out keywords that ask for nothing, and write others as llguidance takes them."""
    schema.pop(OPTIONS, None)
    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]
    if isinstance(form := schema.get("format"), str) and form not in _FORMATS:
        del schema["format"]
    for name in _BOUNDS:
        if type(schema.get(name)) in (int, float):
            schema[name] = _bound(schema[name], is_lower="inimum" in name)
    match schema:
        # The alternatives exclude each other only if the property must be there. Pydantic does not
        # demand it where it has a default.
        case {"oneOf": list(), "discriminator": {"propertyName": str(name)}}:
            required = schema.get("required", [])
            if isinstance(required, list) and name not in required:
                schema["required"] = [*required, name]
    for _, each in subschemas(schema):
        _rewrite(each)


def _bound(value: float, *, is_lower: bool) -> float:
    """The bound, or the next one inside that llguidance takes."""
    if 0 < abs(value) < _LEAST:
        return math.copysign(_LEAST, value) if is_lower == (value > 0) else 0
    return max(value, -_MOST) if is_lower else min(value, _MOST)
