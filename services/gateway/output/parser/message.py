"""Parses one message of a model, by the model's `MessageFormat`."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum

from services.gateway.output.parser.harmony import MARKERS, read_harmony
from services.gateway.output.parser.json_calls import checked_name, read_call, read_calls
from services.gateway.output.parser.parts import CallIds, Part, PartWriter
from services.gateway.output.parser.pythonic import read_list
from services.gateway.output.parser.reader import Malformed, Reader, Reading


class CallFormat(StrEnum):
    """How a model writes calls; each has vLLM's name of its parser."""

    HERMES = "hermes"
    """`<tool_call>{"name": ..., "arguments": ...}</tool_call>`: Hermes, Qwen, SmolLM3, Granite 4"""
    LLAMA3_JSON = "llama3_json"
    """The message is `{"name": ..., "parameters": ...}`: Llama 3.1 to 3.3"""
    PYTHONIC = "pythonic"
    """The message is `[f(x=1), g()]`: Llama 3.2 and 4"""
    MISTRAL = "mistral"
    """`[TOOL_CALLS][{"name": ..., "arguments": ...}]`, or `[TOOL_CALLS]f[ARGS]{...}`"""
    TOOL_CALL_LIST = "phi4_mini_json"
    """`<|tool_call|>[{"name": ..., "arguments": ...}]<|/tool_call|>`: Phi-4-mini, Granite 3"""
    HARMONY = "openai"
    """Messages to functions: gpt-oss. The format has reasoning too."""


_MARKERS: dict[CallFormat, tuple[str, ...]] = {
    CallFormat.HERMES: ("<tool_call>", "</tool_call>"),
    CallFormat.LLAMA3_JSON: ("<|python_tag|>",),
    CallFormat.PYTHONIC: ("<|python_start|>", "<|python_end|>"),
    CallFormat.MISTRAL: ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    CallFormat.TOOL_CALL_LIST: ("<|tool_call|>", "<|/tool_call|>"),
    CallFormat.HARMONY: MARKERS,
}


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """How a model writes its messages. `calls` and `reasoning` are None if it writes none."""

    calls: CallFormat | None = None
    reasoning: tuple[str, str] | None = None
    """The tags that begin and end reasoning."""

    @property
    def markers(self) -> frozenset[str]:
        """The texts that may be special tokens, which a parser must see."""
        calls = () if self.calls is None else _MARKERS[self.calls]
        return frozenset((*calls, *(self.reasoning or ())))


@dataclass(frozen=True, slots=True)
class Parsing:
    """How to parse the messages of one request."""

    format: MessageFormat
    offered: tuple[str, ...] | None = None
    """The names of the functions that the request offers; None if calls are content."""
    begins_in_reasoning: bool = False
    """The prompt has begun the reasoning."""
    reasoning_is_over: bool = False
    """The prompt has ended it."""
    max_calls: int | None = None


class MessageParser:
    """Parses one message as its text arrives. All parts together do not depend on how the text is
    cut, and text that is no complete call stays content."""

    def __init__(self, parsing: Parsing, seed: str) -> None:
        is_short = parsing.format.calls is CallFormat.MISTRAL
        self._reader = Reader()
        self._writer = PartWriter(CallIds(seed, is_short), parsing.max_calls)
        self._ends_calls_by_token = parsing.format.calls is CallFormat.HARMONY
        self._reading = _read_message(self._reader, self._writer, parsing)
        next(self._reading)

    @property
    def has_calls(self) -> bool:
        return self._writer.num_calls > 0

    @property
    def is_in_call(self) -> bool:
        """Whether the last call is not complete. At the end of the text that call is cut."""
        return self._writer.is_in_call

    @property
    def is_in_reasoning(self) -> bool:
        return self._writer.is_in_reasoning

    def push(self, text: str) -> tuple[Part, ...]:
        """The parts that this text completes."""
        self._reader.add(text)
        next(self._reading)
        return self._writer.take()

    def finish(self, *, by_token: bool = False) -> tuple[Part, ...]:
        """The last parts, at the end of the text. `by_token` says that a token without text
        ended it, and not a stop string or a limit."""
        self._reader.end()
        next(self._reading, None)
        if by_token and self._ends_calls_by_token:
            self._writer.end_call()
        self._writer.finish()
        return self._writer.take()


def _read_message(reader: Reader, writer: PartWriter, parsing: Parsing) -> Reading[None]:
    """Reads to the end of the text."""
    writer.is_in_reasoning = parsing.begins_in_reasoning
    yield
    form, offered = parsing.format, parsing.offered
    if form.calls is CallFormat.HARMONY:
        yield from read_harmony(reader, writer, has_calls=offered is not None)
        return
    if form.reasoning is not None and not parsing.reasoning_is_over:
        yield from _read_reasoning(reader, writer, form.reasoning, parsing.begins_in_reasoning)
    if form.calls is not None and offered is not None:
        yield from _READERS[form.calls](reader, writer, offered)
    yield from reader.until((), writer.content)


def _read_reasoning(
    reader: Reader, writer: PartWriter, tags: tuple[str, str], has_begun: bool
) -> Reading[None]:
    begin, end = tags
    if not has_begun:
        reader.hold()
        yield from reader.skip_spaces()
        if not (yield from reader.skip(begin)):
            writer.content(reader.held())
            return
        reader.held()
    writer.is_in_reasoning = True
    found = yield from reader.until((end,), writer.reasoning)
    writer.is_in_reasoning = False
    reader.take(len(found))


def _read_marked(
    reader: Reader, writer: PartWriter, begin: str, end: str, body: Callable[[], Reading[None]]
) -> Reading[None]:
    """Reads content to the end of the text, with calls between `begin` and `end`; "": they end by
    themselves. Other text is content, up to the character where that shows."""
    while (yield from reader.until((begin,), writer.content)):
        num_before = writer.num_calls
        reader.hold()
        try:
            yield from reader.expect(begin)
            yield from body()
            if end:
                yield from reader.skip_spaces()
                if not (yield from reader.close(end)):
                    raise Malformed
            reader.held()
            writer.end_call()
        except Malformed:
            _break_off(reader, writer, num_before)


def _break_off(reader: Reader, writer: PartWriter, num_before: int) -> None:
    """Ends calls before content. A call that the text's end cuts stays as it was written.
    `num_before` calls came before these."""
    rest = reader.held()
    if not reader.was_cut or writer.num_calls == num_before:
        writer.end_call()
        writer.content(rest)


def _read_hermes(reader: Reader, writer: PartWriter, _offered: Collection[str]) -> Reading[None]:
    def body() -> Reading[None]:
        yield from reader.skip_spaces()
        yield from read_call(reader, writer, None)

    yield from _read_marked(reader, writer, "<tool_call>", "</tool_call>", body)


def _read_list(reader: Reader, writer: PartWriter, _offered: Collection[str]) -> Reading[None]:
    def body() -> Reading[None]:
        yield from read_calls(reader, writer)
        yield from reader.skip_spaces()
        yield from reader.close("<|/tool_call|>")  # Granite ends its message instead

    yield from _read_marked(reader, writer, "<|tool_call|>", "", body)


def _read_mistral(reader: Reader, writer: PartWriter, _offered: Collection[str]) -> Reading[None]:
    def body() -> Reading[None]:
        if (yield from reader.skip_spaces()) in ("[", "{"):
            yield from read_calls(reader, writer)
            return
        name = checked_name((yield from reader.name()), None)
        if (yield from reader.skip("[CALL_ID]")):
            yield from reader.name()
        yield from reader.skip("[ARGS]")
        if (yield from reader.skip_spaces()) != "{":
            raise Malformed
        writer.start_call(name)
        reader.held()
        yield from reader.value(writer.arguments)
        reader.hold()

    yield from _read_marked(reader, writer, "[TOOL_CALLS]", "", body)


def _read_llama3(reader: Reader, writer: PartWriter, offered: Collection[str]) -> Reading[None]:
    """Calls without a marker must begin the message, and name a function that is offered."""

    def several(names: Collection[str] | None) -> Reading[None]:
        while True:
            yield from read_call(reader, writer, names)
            writer.end_call()
            if (yield from reader.skip_spaces()) not in (";", ","):
                return
            reader.take(1)
            yield from reader.skip_spaces()

    def body() -> Reading[None]:
        yield from reader.skip_spaces()
        yield from several(None)

    reader.hold()
    try:
        if (yield from reader.skip_spaces()) == "{":
            yield from several(offered)
        writer.content(reader.held())
    except Malformed:
        _break_off(reader, writer, 0)
    yield from _read_marked(reader, writer, "<|python_tag|>", "", body)


def _read_pythonic(reader: Reader, writer: PartWriter, offered: Collection[str]) -> Reading[None]:
    """Calls must begin the message, and name functions that are offered."""
    reader.hold()
    try:
        yield from reader.skip_spaces()
        yield from reader.skip("<|python_start|>")
        yield from reader.skip_spaces()
        yield from read_list(reader, writer, offered)
        yield from reader.skip_spaces()
        yield from reader.close("<|python_end|>")
        reader.held()
    except Malformed:
        _break_off(reader, writer, 0)


_READERS: dict[CallFormat, Callable[[Reader, PartWriter, Collection[str]], Reading[None]]] = {
    CallFormat.HERMES: _read_hermes,
    CallFormat.LLAMA3_JSON: _read_llama3,
    CallFormat.PYTHONIC: _read_pythonic,
    CallFormat.MISTRAL: _read_mistral,
    CallFormat.TOOL_CALL_LIST: _read_list,
}
