"""Translates structures to grammars of llguidance."""

import json
from collections.abc import Callable, Mapping

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from services.common.errors import InvalidRequest
from services.common.structured.json_schemas import with_options
from services.common.structured.regexes import lark_of_regex
from services.common.structured.structural_tags import grammar_of_tags
from services.common.structured.structure import Structure, StructureKind


def grammar_of(structure: Structure, special: Mapping[str, int]) -> str:
    """The grammar of a structure. `special`: the ids of special tokens by name. Raises
    InvalidRequest if its text is malformed; whether a grammar is valid is known when it is
    compiled."""
    kind = structure.kind
    try:
        if kind is StructureKind.STRUCTURAL_TAG:
            return grammar_of_tags(structure.text, special)
        return _GRAMMARS[kind](structure.text)
    except RecursionError as error:
        raise InvalidRequest(f"structured output: the {kind.value} is nested too deeply") from error
    except (GbnfToLarkError, ValueError) as error:
        raise InvalidRequest(f"structured output: the {kind.value} is wrong: {error}") from error


def _json(text: str) -> str:
    schema = json.loads(text) if text else {"type": "object"}
    if schema is True:  # JSON Schema's name for "any value"
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError("a JSON schema is an object")
    return LLMatcher.grammar_from_json_schema(json.dumps(with_options(schema)))


def _choice(text: str) -> str:
    choices = json.loads(text)
    if not isinstance(choices, list) or not choices:
        raise ValueError("a list of at least one string is needed")
    if not all(isinstance(choice, str) for choice in choices):
        raise ValueError("a choice is not a string")
    quoted = (json.dumps(choice, ensure_ascii=False) for choice in choices)
    # One expression: as many rules would take seconds, and a parser's limit.
    return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(quoted))


_GRAMMARS: dict[StructureKind, Callable[[str], str]] = {
    StructureKind.JSON: _json,
    StructureKind.REGEX: lambda text: LLMatcher.grammar_from_lark(lark_of_regex(text)),
    StructureKind.CHOICE: _choice,
    StructureKind.GRAMMAR: lambda text: LLMatcher.grammar_from_lark(any_to_lark(text)),
}
