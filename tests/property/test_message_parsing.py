"""Messages of every format, cut anywhere, give the parts of the whole text and lose nothing."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.output.parser.message import CallFormat, MessageFormat, MessageParser, Parsing
from services.gateway.output.parser.parts import CallArguments, CallStart, Content, Part, joined
from tests.examples import examples

NAMES = ("f", "get_weather")
TAGS = ("<think>", "</think>")
FRAGMENTS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *("<|python_tag|>", "<|python_start|>", "<|tool_call|>", "<|/tool_call|>"),
    *("<|channel|>", "<|start|>assistant", "<|message|>", "<|constrain|>", "<|call|>", "<|end|>"),
    *('{"name": "f", "arguments": ', '"name"', '"f"', ': "get_weather"', '"parameters": ', "f(x="),
    *("{", "}", "[", "]", "(", ")", ",", ";", ":", '"', "'", "\\", " ", "\n", "1", "x=1", "<", "|"),
    *(" to=functions.f", "analysis", "commentary", "final", "[f(", "null", "é"),
]

texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=25).map("".join)
parsings = st.builds(
    Parsing,
    st.builds(MessageFormat, st.none() | st.sampled_from(CallFormat), st.none() | st.just(TAGS)),
    st.none() | st.just(NAMES),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 1]),
)


def parse(parsing: Parsing, text: str, cuts: list[int]) -> tuple[Part, ...]:
    parser, begin = MessageParser(parsing, "seed"), 0
    parts: list[Part] = []
    for end in [*sorted(cut for cut in cuts if cut < len(text)), len(text)]:
        parts += parser.push(text[begin:end])
        begin = end
    return joined([*parts, *parser.finish()])


@settings(max_examples=examples(400))
@given(parsings, texts, st.lists(st.integers(0, 200), max_size=40))
def test_the_cut_of_a_text_changes_no_part(parsing: Parsing, text: str, cuts: list[int]) -> None:
    assert parse(parsing, text, cuts) == parse(parsing, text, [])
    assert parse(parsing, text, list(range(len(text)))) == parse(parsing, text, [])


@given(parsings, texts)
def test_parts_are_well_formed(parsing: Parsing, text: str) -> None:
    """Calls are numbered from 0, and each call begins before its arguments. No part is empty."""
    started = 0
    for part in parse(parsing, text, []):
        match part:
            case CallStart(index, call_id, name):
                assert (index, bool(call_id), bool(name)) == (started, True, True)
                started += 1
            case CallArguments(index, text):
                assert (index, bool(text)) == (started - 1, True)
            case part:
                assert part.text
    assert started <= (parsing.max_calls or started)


arguments = st.dictionaries(
    st.text(max_size=5),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=6,
    ),
    max_size=3,
)
words = st.text(st.characters(codec="ascii", categories=["L", "N"]), max_size=20)


@pytest.mark.parametrize("form", CallFormat)
@given(calls=st.lists(st.tuples(st.sampled_from(NAMES), arguments), min_size=1, max_size=3))
def test_calls_as_models_write_them_are_found(
    form: CallFormat, calls: list[tuple[str, dict[str, object]]]
) -> None:
    if form is CallFormat.PYTHONIC:  # names of parameters are those of Python
        calls = [(name, {f"p{i}": v for i, v in enumerate(a.values())}) for name, a in calls]
    parts = parse(Parsing(MessageFormat(form), NAMES), WRITERS[form](calls), [])
    found: list[tuple[str, str]] = []
    for part in parts:
        match part:
            case CallStart(_, _, name):
                found.append((name, ""))
            case CallArguments(_, text):
                found[-1] = (found[-1][0], found[-1][1] + text)
            case _:
                raise AssertionError(parts)
    assert [(name, json.loads(text)) for name, text in found] == calls


Calls = list[tuple[str, dict[str, object]]]


def _hermes(calls: Calls) -> str:
    said = (json.dumps({"name": name, "arguments": given}) for name, given in calls)
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in said)


def _llama3(calls: Calls) -> str:
    return "; ".join(json.dumps({"name": name, "parameters": given}) for name, given in calls)


def _mistral(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(given)}" for name, given in calls)


def _list(calls: Calls) -> str:
    said = json.dumps([{"name": name, "arguments": given} for name, given in calls])
    return f"<|tool_call|>{said}<|/tool_call|>"


def _pythonic(calls: Calls) -> str:
    said = (
        f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"
        for name, given in calls
    )
    return f"[{', '.join(said)}]"


def _harmony(calls: Calls) -> str:
    header = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"
    said = (header.format(name) + json.dumps(given) for name, given in calls)
    return "<|call|><|start|>assistant".join(said)


WRITERS = {
    CallFormat.HERMES: _hermes,
    CallFormat.LLAMA3_JSON: _llama3,
    CallFormat.PYTHONIC: _pythonic,
    CallFormat.MISTRAL: _mistral,
    CallFormat.TOOL_CALL_LIST: _list,
    CallFormat.HARMONY: _harmony,
}


@given(st.none() | st.sampled_from(CallFormat), words)
def test_plain_text_is_content(form: CallFormat | None, text: str) -> None:
    parts = parse(Parsing(MessageFormat(form, TAGS), NAMES), text, [])
    assert parts == ((Content(text),) if text else ())
