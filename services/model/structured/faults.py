"""Finds the fault of a structure, and its place in the JSON schema."""

import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np

from services.model.structured.grammar import Compiled, Grammar, GrammarWalk, compile_structure
from services.model.structured.json_schemas import subschemas
from services.model.structured.mask import GrammarFault
from services.model.structured.structure import Structure, StructureKind
from services.model.structured.vocabulary import Vocabulary
from services.runtime.errors import InvalidRequest

_NUM_TEXTS, _NUM_TOKENS = 4, 16
"""The texts that are tried, and their length: what a grammar costs shows only when it is walked."""

_SEARCH_S = 0.3
"""The most CPU time of a search within a structure, for the place of a fault or for another one."""

_DEEPEST = 16
"""The most steps of a path."""


def find_fault(structure: Structure, vocabulary: Vocabulary) -> tuple[str, str] | None:
    """The path in a structure's schema and the fault there; None if it has none. A structural tag's
    schemas are tried alone too: a text may come to them later than those that are tried."""
    text = _fault(structure, vocabulary)
    until = time.process_time() + _SEARCH_S
    if structure.kind is StructureKind.JSON and text is not None:
        return _place(structure, text, vocabulary, until), text
    if structure.kind is StructureKind.STRUCTURAL_TAG:
        for schema, path in _schemas_in(structure.text).items():
            part = Structure(StructureKind.JSON, schema)
            if time.process_time() < until and (found := _fault(part, vocabulary)) is not None:
                place = _place(part, found, vocabulary, until)
                return f"{path}.{place}".strip("."), found
    return None if text is None else ("", text)


def _fault(structure: Structure, vocabulary: Vocabulary) -> str | None:
    """The fault that shows when a structure is compiled and some texts of its form are written."""
    compiled = Future[Compiled]()
    try:
        compiled.set_result(compile_structure(structure, vocabulary))
        for seed in range(_NUM_TEXTS):
            _write(Grammar(compiled, vocabulary.size).walk(), vocabulary, random.Random(seed))
    except InvalidRequest as error:
        return str(error)
    except GrammarFault as fault:
        return f"cannot be compiled: {fault}"
    return None


def _write(walk: GrammarWalk, vocabulary: Vocabulary, chance: random.Random) -> None:
    """Draw the tokens of a text of the form. Raises GrammarFault."""
    tokens: list[int] = []
    for _ in range(_NUM_TOKENS):
        bits = np.unpackbits(walk.mask_after(tokens).view(np.uint8), bitorder="little")
        bits[list(vocabulary.ends)] = 0
        if not len(may_come := bits.nonzero()[0]):
            break
        tokens.append(int(chance.choice(may_come)))


def _place(structure: Structure, text: str, vocabulary: Vocabulary, until: float) -> str:
    """The path of the smallest schema within a schema that has the same fault."""
    try:
        schema = json.loads(structure.text)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(schema, dict):
        return ""
    parts, path = subschemas(schema), list[str]()
    named = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    while len(path) < _DEEPEST and time.process_time() < until:
        if (part := next(parts, None)) is None:
            break
        alone = Structure(StructureKind.JSON, json.dumps(named | part[1]))
        if _fault(alone, vocabulary) == text:
            path.append(part[0])
            parts = subschemas(part[1])
    return ".".join(path)


def _schemas_in(tag: str) -> dict[str, str]:
    """The paths of the JSON schemas within a structural tag, by their texts; none if the tag is no
    JSON."""

    def search(form: Any, path: str) -> Iterator[tuple[str, str]]:
        if isinstance(form, list):
            for number, each in enumerate(form):
                yield from search(each, f"{path}[{number}]")
        elif isinstance(form, dict):
            for name, each in form.items():
                if name in ("json_schema", "schema"):
                    yield json.dumps(each), f"{path}.{name}"
                else:
                    yield from search(each, f"{path}.{name}")

    try:
        return dict(search(json.loads(tag), ""))
    except (ValueError, RecursionError):
        return {}
