"""A model with random weights writes only what its schema allows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from quire import LLM, Completion, Sampling, StructuredOutput

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
NUM_SEQUENCES = 5


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), pool_memory="64MiB", threads=1) as llm:
        yield llm


@pytest.mark.parametrize(
    "num_generations",
    [200, pytest.param(2000, marks=[pytest.mark.full, pytest.mark.timeout(1200)])],
)
def test_random_weights_write_nothing_invalid(llm: LLM, num_generations: int) -> None:
    """Temperatures go up to 2. Texts that `max_tokens` cuts are not counted, and are rare."""
    forms = [*map(_json, SCHEMAS), *(StructuredOutput(regex=regex) for regex in REGEXES)]
    asked = [
        (number, forms[number % len(forms)])
        for number in range(-(-num_generations // NUM_SEQUENCES))
    ]
    samplings = [
        Sampling(
            temperature=(0.7, 1.0, 2.0)[number % 3],
            top_p=(1.0, 0.9)[number % 2],
            seed=number,
            max_tokens=600,
            n=NUM_SEQUENCES,
            structured_outputs=form,
        )
        for number, form in asked
    ]
    prompts = [[300 + number % 80, 290] for number, _ in asked]
    answers = llm.generate(prompts, samplings, use_tqdm=False)
    invalid, num_cut = [], 0
    for (_, form), answer in zip(asked, answers, strict=True):
        num_cut += sum(choice.finish_reason == "length" for choice in answer.choices)
        invalid += _invalid(form, answer)
    assert not invalid
    assert num_cut < num_generations / 10
    assert sum(len(answer.choices) for answer in answers) >= num_generations


def _json(schema: Any) -> StructuredOutput:
    return StructuredOutput(json=schema)


def _invalid(form: StructuredOutput, answer: Completion) -> list[tuple[Any, str]]:
    """The finished texts that do not have the form."""
    found = []
    for choice in answer.choices:
        if choice.finish_reason == "stop" and not _has_form(form, choice.text):
            found.append((form, choice.text))
    return found


def _has_form(form: StructuredOutput, text: str) -> bool:
    if form.regex is not None:
        return re.fullmatch(form.regex, text) is not None
    assert isinstance(form.json, dict)
    checker = jsonschema.FormatChecker(["date", "ipv4", "uuid"])
    validator = jsonschema.Draft202012Validator(form.json, format_checker=checker)
    try:
        # RFC 3339 has a year 0000, Python has none.
        return bool(validator.is_valid(json.loads(text.replace('"0000-', '"2000-'))))
    except ValueError:
        return False
