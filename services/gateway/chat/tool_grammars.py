"""The form of texts with calls that a request forces, whose arguments have a schema, or that may
stand in place of a form that the client gave.

A form is a structural tag (`services.model.structured.structural_tags`) in the model's own format
of calls, with each function's parameters as the schema of its arguments. Reasoning comes before
any form, also before one that the client gave.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.gateway.api import RequestedTools
from services.gateway.output.parser.message import CallFormat, Parsing
from services.model.structured.structural_tags import format_of
from services.model.structured.structure import Structure, StructureKind
from services.runtime.errors import InvalidRequest

Form = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Writing:
    """How a model writes calls: `before` and `after` all of them, `begin` (with the name in place
    of NAME) and `end` around the arguments of each. `trigger` is the text that begins calls, if
    other text may stand before them."""

    begin: str
    end: str
    separator: str = ", "
    before: str = ""
    after: str = ""
    trigger: str | None = None


_WRITINGS: dict[CallFormat, _Writing] = {
    CallFormat.HERMES: _Writing(
        '<tool_call>\n{"name": "NAME", "arguments": ',
        "}\n</tool_call>",
        "\n",
        trigger="<tool_call>",
    ),
    CallFormat.LLAMA3_JSON: _Writing('{"name": "NAME", "parameters": ', "}", "; "),
    CallFormat.MISTRAL: _Writing(
        '{"name": "NAME", "arguments": ',
        "}",
        before="[TOOL_CALLS][",
        after="]",
        trigger="[TOOL_CALLS]",
    ),
    CallFormat.TOOL_CALL_LIST: _Writing(
        '{"name": "NAME", "arguments": ',
        "}",
        before="<|tool_call|>[",
        after="]<|/tool_call|>",
        trigger="<|tool_call|>",
    ),
    CallFormat.HARMONY: _Writing(
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", ""
    ),
}
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of a function without the field `parameters`, as OpenAI's API defines it."""
_HARMONY_REASONING = ("<|channel|>analysis<|message|>", "<|end|>")


def structure_of_calls(
    tools: RequestedTools, parsing: Parsing, given: Structure | None = None
) -> Structure | None:
    """The form of the text, if the tools have a part in it; None if they have none.

    A forced call leaves no text for the form that the client gave, which is valid. Otherwise the
    text has that form or is calls, if calls begin with a mark: without one, a grammar cannot tell
    the first tokens of a call from the first tokens of the form. Raises InvalidRequest if the model
    must make calls in a format for which there is no grammar.
    """
    calls = parsing.format.calls
    writing = _WRITINGS.get(calls) if calls else None
    if writing is None:
        if tools.is_forced:
            raise InvalidRequest(
                f"tool_choice: calls in the format {calls} cannot be forced, only with auto",
                "tool_choice",
            )
        return None
    if tools.is_forced:
        form = _sequence(_reasoning(parsing), _calls(tools, parsing, writing))
    elif writing.trigger is None:
        return None
    elif given is not None:
        either = {"type": "or", "elements": [_calls(tools, parsing, writing), format_of(given)]}
        form = _sequence(_reasoning(parsing), either)
    elif tools.strict:
        form = _triggered(tools, writing, writing.trigger)
    else:
        return None
    return _tagged(form)


def structure_after_reasoning(structure: Structure, parsing: Parsing) -> Structure:
    """The form that a client gave, behind the reasoning of a model that writes some."""
    if parsing.format.calls is CallFormat.HARMONY or not (before := _reasoning(parsing)):
        return structure
    return _tagged(_sequence(before, format_of(structure)))


def _tagged(form: Form) -> Structure:
    text = json.dumps({"format": form}, ensure_ascii=False)
    return Structure(StructureKind.STRUCTURAL_TAG, text)


def _sequence(before: list[Form], form: Mapping[str, Any], after: Sequence[Form] = ()) -> Form:
    return {"type": "sequence", "elements": [*before, form, *after]}


def _calls(tools: RequestedTools, parsing: Parsing, writing: _Writing) -> Form:
    """One or more calls, and nothing else."""
    is_harmony = parsing.format.calls is CallFormat.HARMONY
    tags: Form = {
        "type": "tags_with_separator",
        "tags": [
            _tag(writing, definition["function"], tools)
            for definition in tools.definitions
            if tools.function in (None, definition["function"]["name"])
        ],
        "separator": writing.separator,
        "at_least_one": True,
        "stop_after_first": not tools.parallel or tools.function is not None or is_harmony,
    }
    return _sequence(_text(writing.before), tags, _text(writing.after))


def _triggered(tools: RequestedTools, writing: _Writing, trigger: str) -> Form:
    """Any text, and calls in it. The arguments of strict functions have their schema."""
    tags = []
    for definition in tools.definitions:
        tag = _tag(writing, definition["function"], tools)
        tag |= {"begin": writing.before + tag["begin"], "end": tag["end"] + writing.after}
        tags.append(tag)
    return {
        "type": "triggered_tags",
        "triggers": [trigger],
        "tags": tags,
        "stop_after_first": not tools.parallel,
    }


def _tag(writing: _Writing, function: Any, tools: RequestedTools) -> Form:
    schema: Any = None
    if tools.has_schema(function["name"]):
        schema = function.get("parameters", _NO_PARAMETERS)
    return {
        "type": "tag",
        "begin": writing.begin.replace("NAME", function["name"]),
        "content": {"type": "json_schema", "json_schema": schema or {"type": "object"}},
        "end": writing.end,
    }


def _reasoning(parsing: Parsing) -> list[Form]:
    """The text that may stand before a form."""
    tags, begun = parsing.format.reasoning, parsing.begins_in_reasoning
    if parsing.format.calls is CallFormat.HARMONY:
        thought = _thought(*_HARMONY_REASONING)
        both = {"type": "sequence", "elements": [thought, *_text("<|start|>assistant")]}
        return [{"type": "optional", "content": both}]
    if tags is None or parsing.reasoning_is_over:
        return []
    lines = {"type": "regex", "pattern": "\\n{0,2}"}
    if begun:
        return [_thought("", tags[1]), lines]
    return [{"type": "optional", "content": _thought(*tags)}, lines]


def _thought(begin: str, end: str) -> Form:
    return {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": end}


def _text(text: str) -> list[Form]:
    return [{"type": "const_string", "value": text}] if text else []
