"""Faults of structures are found before anything is computed, with their place, and cheaply."""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from services.model.structured.faults import find_fault
from services.model.structured.structure import Structure, StructureKind
from tests.forms import Forms

Find = Callable[[str, Any], tuple[str, str] | None]
CPU_LIMIT_S = 1.0
"""The slowest takes 0.4 s on an idle core."""


@pytest.fixture
def find(forms: Forms) -> Find:
    def find(kind: str, form: Any) -> tuple[str, str] | None:
        text = form if isinstance(form, str) else json.dumps(form)
        return find_fault(Structure(StructureKind(kind), text), forms.vocabulary)

    return find


def nested(depth: int, begin: str, end: str, middle: str = "{}") -> str:
    return begin * depth + middle + end * depth


def tag(schema: Any) -> Any:
    return {
        "type": "tag",
        "begin": "<f>",
        "content": {"type": "json_schema", "json_schema": schema},
        "end": "</f>",
    }


def many(form: str, number: int, separator: str = " | ") -> str:
    return separator.join(form.format(each) for each in range(number))


UNIQUE = {"type": "array", "uniqueItems": True}
INTEGERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
PROPERTIES = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1000)}}


@pytest.mark.parametrize(
    ("kind", "form", "path"),
    [
        ("json", UNIQUE, ""),
        ("json", {"properties": {"a": {}, "x": {"items": UNIQUE}}}, "properties.x.items"),
        (
            "json",
            {"anyOf": [{"type": "null"}, {"prefixItems": [UNIQUE]}]},
            "anyOf[1].prefixItems[0]",
        ),
        (
            "json",
            {"$defs": {"A": {"properties": {"x": UNIQUE}}}, "items": {"$ref": "#/$defs/A"}},
            "$defs.A.properties.x",
        ),
        ("structural_tag", {"format": tag({"items": UNIQUE})}, "format.content.json_schema.items"),
        (
            "structural_tag",
            {"structures": [{"begin": "a", "schema": UNIQUE, "end": "b"}], "triggers": ["a"]},
            "structures[0].schema",
        ),
    ],
)
def test_a_fault_has_its_path(find: Find, kind: str, form: Any, path: str) -> None:
    found = find(kind, form)
    assert found is not None
    assert found[0] == path
    assert 'Unimplemented keys: ["uniqueItems"]' in found[1]


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("grammar", "root ::= " + many('"w{}" [0-9]', 2500)),
        ("json", {"anyOf": [{"required": [f"p{i}"], **INTEGERS} for i in range(2500)]}),
        ("json", PROPERTIES),
        (
            "structural_tag",
            {"format": {"type": "triggered_tags", "triggers": ["<f>"], "tags": [tag(PROPERTIES)]}},
        ),
    ],
)
def test_what_would_fail_at_a_later_token_is_found(find: Find, kind: str, form: Any) -> None:
    found = find(kind, form)
    assert found is not None
    assert "Current row has" in found[1]


HOSTILE: dict[str, tuple[str, Any]] = {
    "a long pattern": ("json", {"type": "string", "pattern": "^a{1000000}$"}),
    "a long regex": ("regex", "a{1000000}"),
    "any text of a length": ("regex", ".{1000000}"),
    "repeats of repeats": ("regex", "(a{1000}){1000}"),
    "as many optional as required": ("regex", "(a?){5000}a{5000}"),
    "many states": ("regex", ".*a.{60}"),
    "a star of stars": ("regex", "(x+x+)+y"),
    "unicode": ("regex", r"(\p{L}|\p{N}){1000}"),
    "intersections": ("grammar", "start: A\nA: /.*a.{20}/ & ~/.*b.{20}/ & /.*c.{20}/"),
    "a small step": ("json", {"type": "number", "multipleOf": 1e-9}),
    "many items": ("json", {"type": "array", "minItems": 1_000_000}),
    "many items at most": ("json", {"type": "array", "maxItems": 1_000_000}),
    "a long string": ("json", {"type": "string", "minLength": 1_000_000}),
    "a long string at most": ("json", {"type": "string", "maxLength": 1_000_000_000}),
    "many properties at most": ("json", {"type": "object", "maxProperties": 1_000_000}),
    "a deep schema": ("json", nested(500, '{"properties":{"a":', "}}")),
    "deep alternatives": ("json", nested(200, '{"anyOf":[', "]}")),
    "a deep tag": ("structural_tag", nested(300, '{"format":{"type":"optional","content":', "}}")),
    "no JSON": ("structural_tag", "[" * 100_000),
    "a reference to itself": ("json", {"$ref": "#"}),
    "references in a ring": (
        "json",
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    ),
    "references that double": (
        "json",
        {
            "$defs": {
                f"d{i}": {"prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)
            }
            | {"d40": {}},
            "$ref": "#/$defs/d0",
        },
    ),
    "a product of alternatives": (
        "json",
        {
            "allOf": [
                {"anyOf": [{"properties": {f"p{i}{j}": {"maxLength": i}}} for j in range(4)]}
                for i in range(12)
            ]
        },
    ),
    "patterns that overlap": (
        "json",
        {"patternProperties": {f"^.*{i}.*$": {"type": "integer"} for i in range(200)}},
    ),
    "a grammar in itself": ("grammar", "start: @grammar_0"),
    "rules of rules": (
        "grammar",
        "start: a0\na300: /x/\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(300)),
    ),
    "an ambiguous grammar": ("grammar", 'start: s\ns: s s | "a" | '),
    "rules that may be empty": (
        "grammar",
        "start: " + many("r{}*", 1900) + "\n" + many('r{}: "a"', 1900, "\n"),
    ),
    "a choice of one long text": ("choice", ["ab cd " * 33_000]),
    "a choice of many texts": ("choice", [str(i * 7919 % 100_003) for i in range(20_000)]),
    "texts that begin alike": ("choice", ["a" * i for i in range(1, 700)]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_form_is_judged_soon(find: Find, name: str) -> None:
    """Taken or refused. Those that the library's limits do not catch end the process that checks
    (`test_gateway_structures.py`)."""
    began = time.process_time()
    find(*HOSTILE[name])
    assert time.process_time() - began < CPU_LIMIT_S
