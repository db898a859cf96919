"""Whatever is drawn from the tokens that a schema or an expression allows has its form."""

import json
import random
import re
from typing import Any

import jsonschema
import pytest

from tests.examples import examples
from tests.forms import EOS, Forms, allowed

DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
TREE = {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}


def _object(**properties: Any) -> dict[str, Any]:
    """The schema of an object with these properties and no others, all required."""
    names = {"properties": properties, "required": [*properties]}
    return {"type": "object", **names, "additionalProperties": False}


SCHEMAS: list[Any] = [
    {"type": "integer"},
    {"type": "integer", "minimum": -7, "exclusiveMaximum": 1200},
    {"type": "integer", "multipleOf": 7},
    {"type": "number"},
    {"type": "number", "minimum": -0.5, "maximum": 2.25},
    {"type": "boolean"},
    {"type": "null"},
    {"type": ["null", "boolean", "integer"]},
    {"type": "string", "maxLength": 9},
    {"type": "string", "minLength": 3, "maxLength": 5},
    {"type": "string", "pattern": "^[A-Z][a-z]{2,8}( [A-Z][a-z]{2,8})?$"},
    {"type": "string", "pattern": "^(a|bb|c*)d$", "maxLength": 12},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "time"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "uuid"},
    {"enum": ["a", 'quote " and \\', "ünï", 1, 2.5, None, [1, {"x": "y"}]]},
    {"const": {"deep": [1, "two", {"three": None}]}},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 6},
    {"prefixItems": [{"type": "integer"}, {"type": "string", "maxLength": 4}]}
    | {"type": "array", "items": {"type": "null"}, "maxItems": 5},
    {"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "items": False, "minItems": 1},
    {"anyOf": [{"type": "integer", "maximum": 9}, {"type": "string", "maxLength": 3}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 12}]},
    {"oneOf": [{"type": "integer"}, {"type": "boolean"}]},
    _object(
        name={"type": "string", "maxLength": 10},
        age={"type": "integer", "minimum": 0, "maximum": 150},
        tags={"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3},
    )
    | {"required": ["name", "age"]},
    _object(a={"type": "boolean"}, b={"type": "null"}, c={"const": 0}) | {"required": []},
    _object(id=DIGIT) | {"additionalProperties": {"type": "boolean"}, "maxProperties": 3},
    _object() | {"patternProperties": {"^k[0-9]$": {"type": "boolean"}}, "maxProperties": 3},
    {"$defs": {"tree": _object(value=DIGIT, left=TREE, right=TREE)}, "$ref": "#/$defs/tree"},
    _object(
        call={
            "anyOf": [
                _object(
                    name={"const": name},
                    arguments=_object(**{field: {"type": "string", "maxLength": 8}}),
                )
                for name, field in (("weather", "city"), ("stock", "symbol"))
            ]
        }
    ),
]
REGEXES = [r"[a-c]{2,5}-\d+x", r"(\d{1,3}\.){3}\d{1,3}", r"(yes|no)(, (yes|no)){0,4}\.", r"é+ü{3}"]
MAX_TOKENS = 600


@pytest.mark.parametrize(
    ("kind", "form"),
    [*(("json", json.dumps(schema)) for schema in SCHEMAS), *(("regex", one) for one in REGEXES)],
)
def test_drawn_texts_have_their_form(forms: Forms, kind: str, form: str) -> None:
    """A text that may end does so every fourth time. A text that `MAX_TOKENS` cuts is not compared;
    few are."""
    num_texts, num_whole = examples(60), 0
    for seed in range(num_texts):
        walk, draw, tokens = forms.grammar(kind, form).walk(), random.Random(seed), list[int]()
        while len(tokens) < MAX_TOKENS:
            may_come = allowed(walk.mask_after(tokens))
            if EOS in may_come and (len(may_come) == 1 or draw.random() < 0.25):
                num_whole += 1
                assert has_form(kind, form, forms.tokenizer.decode(tokens))
                break
            tokens.append(draw.choice([token for token in may_come if token != EOS]))
    assert num_whole > 0.8 * num_texts


def has_form(kind: str, form: str, text: str) -> bool:
    if kind == "regex":
        return re.fullmatch(form, text) is not None
    checker = jsonschema.FormatChecker(["date", "ipv4", "uuid"])
    validator = jsonschema.Draft202012Validator(json.loads(form), format_checker=checker)
    try:
        # RFC 3339 has a year 0000, Python has none.
        return bool(validator.is_valid(json.loads(text.replace('"0000-', '"2000-'))))
    except ValueError:
        return False
