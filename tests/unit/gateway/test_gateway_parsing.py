"""Reasoning, content and tool calls in the text of a model."""

from typing import Any

import pytest

from services.gateway.output.parser.choice import Parsers
from services.gateway.output.parser.message import CallFormat, MessageFormat, MessageParser, Parsing
from services.gateway.output.parser.parts import (
    CallArguments,
    CallIds,
    CallStart,
    Content,
    Part,
    Reasoning,
    joined,
)

THINK = ("<think>", "</think>")
IDS, SHORT_IDS = CallIds("s"), CallIds("s", is_short=True)


def parse(
    form: CallFormat | None, text: str, offered: tuple[str, ...] | None = ("f", "g"), **fields: Any
) -> list[Part]:
    """Parse the text one character at a time."""
    parser = MessageParser(Parsing(MessageFormat(form, THINK), offered, **fields), "s")
    parts = [part for char in text for part in parser.push(char)]
    return list(joined([*parts, *parser.finish()]))


def call(index: int, name: str, arguments: str, ids: CallIds = IDS) -> list[Part]:
    return [CallStart(index, ids.id(index), name), CallArguments(index, arguments)]


def test_a_message_has_reasoning_then_content_then_calls() -> None:
    text = (
        "<think>\nHm, \n\nyes.\n</think>\n\nLook:\n\n"
        '<tool_call>\n{"name": "f", "arguments": {"a": [1, "}"]}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {"b": 2}, "id": "x", "name": "g"}\n</tool_call>\n'
    )
    assert parse(CallFormat.HERMES, text) == [
        Reasoning("Hm, \n\nyes."),
        Content("Look:"),
        *call(0, "f", '{"a": [1, "}"]}'),
        *call(1, "g", '{"b": 2}'),
    ]


def test_arguments_are_streamed_as_the_model_writes_them() -> None:
    parser = MessageParser(Parsing(MessageFormat(CallFormat.HERMES), ()), "s")
    assert parser.push('<tool_call>{"name": "f"') == (CallStart(0, IDS.id(0), "f"),)
    assert parser.push(', "arguments": {"a"') == (CallArguments(0, '{"a"'),)
    assert parser.push(": 1}") == (CallArguments(0, ": 1}"),)
    assert parser.push("}</tool_") == parser.push("call>") == parser.finish() == ()
    assert parser.has_calls


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('"{\\"a\\": \\"}\\"}"', '{"a": "}"}'),
        ('"{\\"a\\": "', '"{\\"a\\": "'),
        ('"two"', '"two"'),
        ('"\\ud800"', '"\\ud800"'),
        ("null", "null"),
    ],
)
@pytest.mark.parametrize("early", [False, True])
def test_object_in_a_json_string_is_taken_out(written: str, arguments: str, early: bool) -> None:
    fields = ['"name": "f"', f'"arguments": {written}']
    text = f"<tool_call>{{{', '.join(reversed(fields) if early else fields)}}}</tool_call>"
    assert parse(CallFormat.HERMES, text) == call(0, "f", arguments)


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        ("llama3_json", '{"name": "f", "parameters": {"x": "1"}}', call(0, "f", '{"x": "1"}')),
        (
            "llama3_json",
            'Well <|python_tag|>{"name": "h", "parameters": {}}; {"name": "f", "parameters": {}}',
            [Content("Well"), *call(0, "h", "{}"), *call(1, "f", "{}")],
        ),
        (
            "pythonic",
            '[f(x=1, y="it\'s ]", z=[None, True]), g()]',
            [*call(0, "f", '{"x": 1, "y": "it\'s ]", "z": [null, true]}'), *call(1, "g", "{}")],
        ),
        (
            "mistral",
            'So [TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]',
            [Content("So"), *call(0, "f", '{"x": 1}', SHORT_IDS)],
        ),
        (
            "mistral",
            '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"x": 1}[TOOL_CALLS]g{}',
            [*call(0, "f", '{"x": 1}', SHORT_IDS), *call(1, "g", "{}", SHORT_IDS)],
        ),
        ("phi4_mini_json", '<|tool_call|>[{"name": "f"}]<|/tool_call|>', call(0, "f", "{}")),
        (
            "openai",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary"
            "<|message|>Look:<|end|><|start|>assistant to=functions.f<|channel|>commentary json"
            '<|message|>{"x": 1}<|call|>',
            [Reasoning("Hm."), Content("Look:"), *call(0, "f", '{"x": 1}')],
        ),
        (
            "openai",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>OK",
            [Reasoning("Hm."), Content("OK")],
        ),
    ],
)
def test_each_format_has_its_calls(form: str, text: str, expected: list[Part]) -> None:
    assert parse(CallFormat(form), text) == expected


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "<tool_call>call f, please</tool_call>"),
        ("hermes", '<tool_call>{"arguments": {"x": 1}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": ["f"]}</tool_call>'),
        ("hermes", '<tool_call>{"name'),
        ("llama3_json", '{"name": "Bob", "parameters": {}}'),
        ("llama3_json", '{"answer": [1, 2]} is it'),
        ("llama3_json", 'I say {"name": "f", "parameters": {}}'),
        ("llama3_json", '<|python_tag|>brave_search.call(query="x")'),
        ("pythonic", "[f(1)]"),
        ("pythonic", "[f(x=open('y'))]"),
        ("pythonic", "[h(x=1)]"),
        ("pythonic", "[f(**{'x': 1})]"),
        ("pythonic", f"[f(x={'-' * 5000}1)]"),
        ("pythonic", f"[f(x={'[' * 500}{']' * 500})]"),
        ("pythonic", f"[f(x='{'y' * 70000}')]"),
        ("pythonic", "[f(x=1e999)]"),
        ("pythonic", "see [1] and [f(x=1)]"),
        ("mistral", "[TOOL_CALLS] none"),
        ("mistral", "[TOOL_CALLS][]"),
        ("openai", "<|channel|>analysis"),
        ("openai", "<|start|>assistant<|start|>"),
        ("openai", "Hello."),
    ],
)
def test_text_without_a_call_is_content(form: str, text: str) -> None:
    assert parse(CallFormat(form), text) == [Content(text)]


def test_text_after_a_broken_call_is_content() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}, oh}</tool_call> and'
    rest = Content(", oh}</tool_call> and")
    assert parse(CallFormat.HERMES, text) == [*call(0, "f", '{"a": 1}'), rest]
    text = '<tool_call>{"name": "f", "arguments": {"a": 1]} no'
    assert parse(CallFormat.HERMES, text) == [*call(0, "f", '{"a": 1'), Content("]} no")]
    text = '<tool_call>oh</tool_call><tool_call>{"name": "f"}</tool_call>'
    assert parse(CallFormat.HERMES, text) == [
        Content("<tool_call>oh</tool_call>"),
        *call(0, "f", "{}"),
    ]


LIST = '{"name": "f", "arguments": {"a": 1}}'


@pytest.mark.parametrize(
    ("form", "text", "begin"),
    [
        ("hermes", f"<tool_call>\n{LIST}\n</tool_call>", "<tool_call>\n{"),
        ("llama3_json", f"{LIST}; {LIST}", "{"),
        ("mistral", f"[TOOL_CALLS][{LIST}, {LIST}]", "[TOOL_CALLS][{"),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}', "[TOOL_CALLS]f[ARGS]{"),
        ("phi4_mini_json", f"<|tool_call|>[{LIST}, {LIST}]<|/tool_call|>", "<|tool_call|>[{"),
        ("pythonic", "[f(a=1), f(a=1)]<|python_end|>", "[f(a=1)"),
        (
            "openai",
            '<|channel|>commentary to=functions.f<|message|>{"a": 1}',
            "<|channel|>commentary to=functions.f<|message|>",
        ),
    ],
)
def test_a_cut_call_is_what_was_written(form: str, text: str, begin: str) -> None:
    """As by max_tokens: no scraps of it are content, and nothing is made up."""
    for size in range(len(begin), len(text) + 1):
        parts = parse(CallFormat(form), text[:size])
        if not any(isinstance(part, CallStart) for part in parts):
            continue  # its name is not complete
        assert not any(isinstance(part, Content) for part in parts), text[:size]
        for part in parts:
            if isinstance(part, CallArguments):
                assert '{"a": 1}'.startswith(part.text), text[:size]


@pytest.mark.parametrize(
    ("form", "text", "begin"),
    [
        ("hermes", f"<tool_call>\n{LIST}\n</tool_call>", '{"name": "f"'),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}', None),
        ("llama3_json", LIST, '{"name": "f"'),
        ("mistral", f"[TOOL_CALLS][{LIST}]", '{"name": "f"'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}', "[ARGS]{"),
        ("phi4_mini_json", f"<|tool_call|>[{LIST}]<|/tool_call|>", '{"name": "f"'),
        ("pythonic", "[f(a=1)]", None),
    ],
)
@pytest.mark.parametrize("max_calls", [None, 1])
def test_a_call_is_complete_with_its_arguments(
    form: str, text: str, begin: str | None, max_calls: int | None
) -> None:
    """`begin` is the text that makes the call's name known; None if its arguments come first."""
    begun = len(text) if begin is None else text.index(begin) + len(begin)
    complete = text.index("1") + 2
    parsing = Parsing(MessageFormat(CallFormat(form)), ("f", "g"), max_calls=max_calls)
    for size in range(len(text) + 1):
        parser = MessageParser(parsing, "s")
        parser.push(text[:size])
        parser.finish()
        assert parser.is_in_call is (begun <= size < complete), text[:size]


def test_a_dropped_call_leaves_the_message_complete() -> None:
    text = '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g", "arguments": {'
    for max_calls in (1, 2):
        parsing = Parsing(MessageFormat(CallFormat.HERMES), ("f", "g"), max_calls=max_calls)
        parser = MessageParser(parsing, "s")
        parser.push(text)
        parser.finish()
        assert parser.is_in_call is (max_calls == 2)


@pytest.mark.parametrize(
    ("end", "by_token", "is_cut"),
    [("", True, False), ("", False, True), ("<|end|>", False, False)],
)
def test_a_token_may_end_a_call_of_gpt_oss(end: str, by_token: bool, is_cut: bool) -> None:
    """The format's mark behind a call is an end-of-sequence token, which is no text."""
    parser = MessageParser(Parsing(MessageFormat(CallFormat.HARMONY), ("f",)), "s")
    parser.push('<|channel|>commentary to=functions.f<|message|>{"a": 1}' + end)
    parser.finish(by_token=by_token)
    assert parser.is_in_call is is_cut


def test_text_without_offered_functions_has_no_calls() -> None:
    text = '<think>Hm</think> <tool_call>{"name": "f"}</tool_call>'
    assert parse(CallFormat.HERMES, text, None) == [Reasoning("Hm"), Content(text[18:])]


def test_only_one_call_may_be_asked_for() -> None:
    text = '<tool_call>{"name": "f"}</tool_call>' * 3
    assert parse(CallFormat.HERMES, text, max_calls=1) == call(0, "f", "{}")


def test_the_prompt_may_begin_or_end_the_reasoning() -> None:
    begun = parse(None, "\nHm\n</think>\n\nYes \n", begins_in_reasoning=True)
    assert begun == [Reasoning("Hm"), Content("Yes \n")]
    assert parse(None, "Hm", begins_in_reasoning=True) == [Reasoning("Hm")]
    over = parse(None, "<think>is a tag", reasoning_is_over=True)
    assert over == [Content("<think>is a tag")]
    assert parse(None, " \nNo <think>") == [Content(" \nNo <think>")]


@pytest.mark.parametrize(
    ("template", "calls", "reasoning"),
    [
        ("<tool_call>", CallFormat.HERMES, None),
        ("<tool_call> <think> </think>", CallFormat.HERMES, THINK),
        ("<tool_call>\n<function=f>", None, None),
        ("<tool_call>f\n<arg_key>", None, None),
        ('{"name": function name, "parameters": dictionary', CallFormat.LLAMA3_JSON, None),
        ("[func_name1(params_name1=params_value1)]", CallFormat.PYTHONIC, None),
        ("[TOOL_CALLS] [THINK] [/THINK]", CallFormat.MISTRAL, ("[THINK]", "[/THINK]")),
        ("<|tool_call|>", CallFormat.TOOL_CALL_LIST, None),
        ("<|start|> <|channel|>analysis", CallFormat.HARMONY, None),
        (None, None, None),
    ],
)
def test_the_format_is_that_of_the_chat_template(
    template: str | None, calls: CallFormat | None, reasoning: tuple[str, str] | None
) -> None:
    assert Parsers().format(template) == MessageFormat(calls, reasoning)
    assert Parsers("none", "none").format(template) == MessageFormat(None, None)
    assert Parsers("pythonic", "think").format(template) == MessageFormat(
        CallFormat.PYTHONIC, THINK
    )
