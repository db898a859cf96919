"""gpt-oss's format: a message is a sequence of messages, each for a channel or for a function.

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary
to=functions.f <|constrain|>json<|message|>{...}<|call|>
"""

import re

from services.gateway.output.parser.json_calls import checked_name
from services.gateway.output.parser.parts import PartWriter
from services.gateway.output.parser.reader import Malformed, Reader, Reading, Sink

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKERS = (START, CHANNEL, MESSAGE, "<|constrain|>", *ENDS)

_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")
_IS_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")


def read_harmony(reader: Reader, writer: PartWriter, *, has_calls: bool) -> Reading[None]:
    """Reads messages to the end. Text without a complete header is content."""
    while (yield from reader.until((START, CHANNEL), writer.content)):
        reader.hold()
        try:
            header = yield from _header(reader)
            sink = _sink(header, writer, has_calls=has_calls)
        except Malformed:
            writer.content(reader.held())
            continue
        reader.held()
        writer.is_in_reasoning = sink == writer.reasoning
        end = yield from reader.until((START, *ENDS), sink)
        writer.is_in_reasoning = False
        if end != START:
            reader.take(len(end))
        if end:  # a call that the text's end cuts stays as it was written
            writer.end_call()


def _header(reader: Reader) -> Reading[str]:
    """Reads up to the message's text, and returns what it read."""
    found: list[str] = []
    if (yield from reader.skip(START)):
        yield from reader.until(MARKERS, found.append)
    if (yield from reader.skip(CHANNEL)):
        found.append(CHANNEL)
    while (marker := (yield from reader.until(MARKERS, found.append))) == "<|constrain|>":
        reader.take(len(marker))
    if marker != MESSAGE:
        raise Malformed
    reader.take(len(MESSAGE))
    return "".join(found)


def _sink(header: str, writer: PartWriter, *, has_calls: bool) -> Sink:
    recipient = _RECIPIENT.search(header)
    if recipient and has_calls:
        writer.start_call(checked_name(recipient[1], None))
        return writer.arguments
    return writer.reasoning if _IS_ANALYSIS.search(header) else writer.content
