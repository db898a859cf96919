"""Forced calls: every text that the grammar allows has calls, with arguments of their schema. Calls
in place of a form that the client gave."""

import json
import random
from typing import Any

import jsonschema
import pytest

from services.gateway.api import RequestedTools, ToolChoice
from services.gateway.chat.tool_grammars import structure_after_reasoning, structure_of_calls
from services.gateway.output.parser.message import CallFormat, MessageFormat, MessageParser, Parsing
from services.gateway.output.parser.parts import CallArguments, CallStart, Content, Part, joined
from services.model.structured.structure import Structure, StructureKind
from services.runtime.errors import InvalidRequest
from tests.forms import EOS, Forms, allowed

MAX_TOKENS = 600
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "g.h")
)
FORCED = [form for form in CallFormat if form is not CallFormat.PYTHONIC]
THINK = ("<think>", "</think>")
CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "Bonn", "unit": "C"}}\n</tool_call>'


def form_of(
    tools: RequestedTools, parsing: Parsing, given: Structure | None = None
) -> tuple[StructureKind, str]:
    structure = structure_of_calls(tools, parsing, given)
    assert structure is not None
    return structure.kind, structure.text


def calls_in(text: str, parsing: Parsing) -> list[tuple[str, str]]:
    parser = MessageParser(parsing, "seed")
    parts: tuple[Part, ...] = joined([*parser.push(text), *parser.finish()])
    found: list[tuple[str, str]] = []
    for part in parts:
        match part:
            case CallStart(_, _, name):
                found.append((name, ""))
            case CallArguments(_, arguments):
                found[-1] = (found[-1][0], found[-1][1] + arguments)
            case _:
                raise AssertionError(parts)
    return found


@pytest.mark.parametrize("form", FORCED)
@pytest.mark.parametrize("function", [None, "g.h"])
def test_whatever_a_model_draws_is_a_call_with_valid_arguments(
    forms: Forms, form: CallFormat, function: str | None
) -> None:
    choice = ToolChoice.AUTO if function else ToolChoice.REQUIRED
    tools = RequestedTools(TOOLS, choice, function)
    parsing = Parsing(MessageFormat(form), tools.names, reasoning_is_over=True)
    for seed in range(6):
        walk, draw = forms.grammar(*form_of(tools, parsing)).walk(), random.Random(seed)
        tokens: list[int] = []
        if form is CallFormat.HARMONY:  # its reasoning may be any text, and take any time
            tokens += forms.tokenizer.encode("<|channel|>c")
        while EOS not in (may_come := allowed(walk.mask_after(tokens))):
            assert len(tokens) < MAX_TOKENS
            quick = [token for token in may_come if not forms.tokenizer.decode([token]).isspace()]
            tokens.append(draw.choice(quick or may_come))
        calls = calls_in(forms.tokenizer.decode(tokens), parsing)
        assert calls
        for name, arguments in calls:
            assert name in ((function,) if function else tools.names)
            jsonschema.validate(json.loads(arguments), SCHEMA)
        assert function is None or len(calls) == 1


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({}, [CALL, f"{CALL}\n{CALL}", f"<think>Hm <b></think>\n\n{CALL}"], ["Hm", f"Hm {CALL}"]),
        ({"begins_in_reasoning": True}, [f"Hm\n</think>\n\n{CALL}"], [CALL]),
        ({"reasoning_is_over": True}, [CALL], [f"<think>Hm</think>{CALL}", CALL.replace("C", "K")]),
    ],
)
def test_reasoning_may_stand_before_a_forced_call(
    forms: Forms, fields: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    tools = RequestedTools(TOOLS, ToolChoice.REQUIRED)
    parsing = Parsing(MessageFormat(CallFormat.HERMES, THINK), tools.names, **fields)
    for texts, expected in ((good, True), (bad, False)):
        for text in texts:
            assert forms.accepts(*form_of(tools, parsing), text) is expected, text


def test_only_one_call_may_be_forced(forms: Forms) -> None:
    tools = RequestedTools(TOOLS, ToolChoice.REQUIRED, parallel=False)
    parsing = Parsing(MessageFormat(CallFormat.HERMES), tools.names)
    assert not forms.accepts(*form_of(tools, parsing), f"{CALL}\n{CALL}")


@pytest.mark.parametrize(
    ("more", "takes_any"), [({}, False), ({"parameters": {}}, True)], ids=["absent", "empty"]
)
def test_a_function_without_parameters_gets_no_arguments(
    forms: Forms, more: dict[str, Any], takes_any: bool
) -> None:
    definition = {"type": "function", "function": {"name": "ping", **more}}
    tools = RequestedTools((definition,), ToolChoice.REQUIRED)
    parsing = Parsing(MessageFormat(CallFormat.HERMES), tools.names)
    for arguments, is_right in (("{}", True), ('{"any": 1}', takes_any)):
        text = f'<tool_call>\n{{"name": "ping", "arguments": {arguments}}}\n</tool_call>'
        assert forms.accepts(*form_of(tools, parsing), text) is is_right, text


def test_strict_functions_have_their_schema_within_any_text(forms: Forms) -> None:
    tools = RequestedTools(TOOLS, strict=("f",))
    parsing = Parsing(MessageFormat(CallFormat.HERMES), tools.names)
    free = '<tool_call>\n{"name": "g.h", "arguments": {"any": 1}}\n</tool_call>'
    for good in ("Hello.", f"Look: {CALL} and {free}"):
        assert forms.accepts(*form_of(tools, parsing), good), good
    for bad in (CALL.replace("Bonn", "Bonn am Rhein"), CALL.replace('"f"', '"x"')):
        assert not forms.accepts(*form_of(tools, parsing), bad), bad
    assert structure_of_calls(RequestedTools(TOOLS), parsing) is None
    bare = Parsing(MessageFormat(CallFormat.LLAMA3_JSON), tools.names)
    assert structure_of_calls(tools, bare) is None


ARGUMENTS = '{"city": "Bonn", "unit": "C"}'
WITH_MARKS = {
    CallFormat.HERMES: CALL,
    CallFormat.MISTRAL: f'[TOOL_CALLS][{{"name": "f", "arguments": {ARGUMENTS}}}]',
    CallFormat.TOOL_CALL_LIST: (
        f'<|tool_call|>[{{"name": "f", "arguments": {ARGUMENTS}}}]<|/tool_call|>'
    ),
}
WARMTH = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "warm": {"type": "boolean"}},
    "required": ["name", "warm"],
    "additionalProperties": False,
}
ANSWER = '{"name": "Bonn", "warm": true}'


@pytest.mark.parametrize("form", WITH_MARKS)
def test_a_text_with_a_form_may_be_calls_instead(forms: Forms, form: CallFormat) -> None:
    """A model with tools first calls them, and gives the answer with the form in a later turn."""
    tools, call = RequestedTools(TOOLS, strict=("f",)), WITH_MARKS[form]
    parsing = Parsing(MessageFormat(form, THINK), tools.names)
    given = Structure(StructureKind.JSON, json.dumps(WARMTH))
    for good in (call, ANSWER, f"<think>Hm</think>\n{call}", f"<think>Hm</think>\n{ANSWER}"):
        assert forms.accepts(*form_of(tools, parsing, given), good), good
    for bad in ("Hm", f"Look: {call}", f"{ANSWER}{call}", call.replace('"C"', '"K"')):
        assert not forms.accepts(*form_of(tools, parsing, given), bad), bad
    over = Parsing(MessageFormat(form), tools.names)
    assert len(calls_in(call, over)) == 1
    parser = MessageParser(over, "seed")
    assert (*parser.push(ANSWER), *parser.finish()) == (Content(ANSWER),)


@pytest.mark.parametrize("form", FORCED)
def test_a_forced_call_leaves_no_text_for_a_form(form: CallFormat) -> None:
    tools = RequestedTools(TOOLS, ToolChoice.REQUIRED)
    parsing, given = Parsing(MessageFormat(form), tools.names), Structure(StructureKind.JSON, "")
    assert structure_of_calls(tools, parsing, given) == structure_of_calls(tools, parsing)


@pytest.mark.parametrize("form", [form for form in CallFormat if form not in WITH_MARKS])
def test_a_form_leaves_no_calls_without_a_mark(form: CallFormat) -> None:
    parsing, given = Parsing(MessageFormat(form), ("f",)), Structure(StructureKind.JSON, "")
    assert structure_of_calls(RequestedTools(TOOLS), parsing, given) is None


def test_pythonic_calls_cannot_be_forced() -> None:
    parsing = Parsing(MessageFormat(CallFormat.PYTHONIC), ("f",))
    with pytest.raises(InvalidRequest, match="pythonic cannot be forced"):
        structure_of_calls(RequestedTools(TOOLS, ToolChoice.REQUIRED), parsing)


@pytest.mark.parametrize(
    ("kind", "form", "text"),
    [
        ("json", "", '{"a": 1}'),
        ("json", json.dumps(SCHEMA), '{"city": "Bonn", "unit": "C"}'),
        ("regex", "[a-c]+", "abc"),
        ("choice", json.dumps(["a/b", "c\td\n.", "ä"]), "c\td\n."),
        ("choice", json.dumps([f"{i}." for i in range(20_000)]), "19999."),
        ("grammar", 'start: "a" | "b"', "b"),
        ("grammar", 'root ::= "a" | "b"', "b"),
        ("structural_tag", '{"format": {"type": "const_string", "value": "a"}}', "a"),
    ],
)
def test_reasoning_comes_before_a_form_of_the_client(
    forms: Forms, kind: str, form: str, text: str
) -> None:
    """Otherwise the form is the reasoning of a template that opens it, and the content is empty."""
    asked, has_reasoning = Structure(StructureKind(kind), form), MessageFormat(None, THINK)

    def accepts(said: str, parsing: Parsing) -> bool:
        structure = structure_after_reasoning(asked, parsing)
        assert len(structure.text) < len(form) + 1000
        return forms.accepts(structure.kind, structure.text, said)

    begun = Parsing(has_reasoning, begins_in_reasoning=True)
    assert accepts(f"Hm {{\n</think>\n\n{text}", begun)
    assert not accepts(text, begun)
    free = Parsing(has_reasoning)
    assert accepts(text, free)
    assert accepts(f"<think>\nHm\n</think>\n{text}", free)
    over = Parsing(has_reasoning, reasoning_is_over=True)
    assert structure_after_reasoning(asked, over) is asked
    assert structure_after_reasoning(asked, Parsing(MessageFormat())) is asked
