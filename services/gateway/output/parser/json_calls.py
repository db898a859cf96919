"""Calls that are JSON objects, with the name of the function and its arguments."""

from collections.abc import Collection

from pydantic_core import from_json

from services.gateway.output.parser.parts import PartWriter
from services.gateway.output.parser.reader import Malformed, Reader, Reading, Sink

_ARGUMENTS = ("arguments", "parameters")


def read_call(reader: Reader, writer: PartWriter, offered: Collection[str] | None) -> Reading[None]:
    """Reads `{"name": "...", "arguments": {...}}`, with its keys in any order.

    The call starts as soon as its name is known, and its arguments are passed on as they are
    written. `offered` are the functions that may be called; None allows any. Malformed: this is no
    such object; the reader holds what is not part of the call.
    """
    name: str | None = None
    early: list[str] | None = None  # arguments before the name
    yield from reader.expect("{")
    char = yield from reader.skip_spaces()
    while char != "}":
        key = yield from _key(reader)
        if key == "name" and name is None:
            name = checked_name((yield from reader.string()), offered)
            writer.start_call(name)
            for text in early or ():
                writer.arguments(text)
            if early is not None:
                writer.end_call()
            reader.hold()
        elif key in _ARGUMENTS and name is None and early is None:
            early = []
            yield from _read_arguments(reader, early.append)
        elif key in _ARGUMENTS and name is not None and early is None:
            early = []
            reader.held()
            yield from _read_arguments(reader, writer.arguments)
            writer.end_call()
            reader.hold()
        elif key not in ("name", *_ARGUMENTS):
            yield from reader.value(lambda _: None)
        else:
            raise Malformed
        char = yield from reader.skip_spaces()
        if char == ",":
            reader.take(1)
            char = yield from reader.skip_spaces()
            if char == "}":
                raise Malformed
        elif char != "}":
            raise Malformed
    if name is None:
        raise Malformed
    reader.take(1)
    reader.hold()


def _read_arguments(reader: Reader, sink: Sink) -> Reading[None]:
    """Gives `sink` the arguments as they are written. An object that the model has written into a
    JSON string is taken out of it."""
    if (yield from reader.peek()) != '"':
        yield from reader.value(sink)
        return
    written: list[str] = []
    yield from reader.value(written.append)
    sink(_unwrapped("".join(written)))


def _unwrapped(string: str) -> str:
    """The JSON object in a JSON string; the string as it is if it has none."""
    try:
        text: str = from_json(string)
        return text if isinstance(from_json(text), dict) else string
    except ValueError:
        return string


def _key(reader: Reader) -> Reading[str]:
    key = yield from reader.string()
    yield from reader.skip_spaces()
    yield from reader.expect(":")
    yield from reader.skip_spaces()
    return key


def read_calls(reader: Reader, writer: PartWriter) -> Reading[None]:
    """Reads one call, or a list of calls, of any functions."""
    if (yield from reader.skip_spaces()) != "[":
        yield from read_call(reader, writer, None)
        writer.end_call()
        return
    reader.take(1)
    yield from reader.skip_spaces()
    has_ended = False
    while not has_ended:
        yield from read_call(reader, writer, None)
        writer.end_call()
        has_ended = yield from reader.ends_list()


def checked_name(name: str, offered: Collection[str] | None) -> str:
    """The name, if a function can have it. Malformed: it is empty or has characters that cannot be
    printed, or the function is not among `offered`."""
    if not name or not name.isprintable() or (offered is not None and name not in offered):
        raise Malformed
    return name
