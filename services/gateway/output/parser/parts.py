"""The parts of an assistant's message: reasoning, content and tool calls."""

import base64
import hashlib
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The beginning of the tool call number `index` of a message."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next characters of the arguments of a call: JSON, if the model writes JSON."""

    index: int
    text: str


Part = Content | Reasoning | CallStart | CallArguments


def joined(parts: list[Part]) -> tuple[Part, ...]:
    """The same parts, with neighbours of one kind as one part."""
    result: list[Part] = []
    for part in parts:
        last = result[-1] if result else None
        if last is None or isinstance(part, CallStart) or isinstance(last, CallStart):
            result.append(part)
        elif replace(last, text=part.text) == part:
            result[-1] = replace(last, text=last.text + part.text)
        else:
            result.append(part)
    return tuple(result)


@dataclass(frozen=True, slots=True)
class CallIds:
    """Makes the ids of one sequence's calls. They are a function of `seed`, so that a client that
    continues a broken stream gets the same ids."""

    seed: str
    is_short: bool = False
    """Whether an id has 9 letters and digits, as Mistral's templates demand."""

    def id(self, index: int) -> str:
        digest = hashlib.sha256(f"{self.seed}/{index}".encode()).digest()
        text = base64.b32encode(digest).decode().lower()
        return text[:9] if self.is_short else f"call_{text[:24]}"


class PartWriter:
    """Collects the parts that a parser finds.

    White space beside a call belongs to the format, not to the content, so `content` holds it back
    until other text follows. The same holds for white space at both ends of reasoning. Calls after
    `max_calls` are dropped; None is no limit.
    """

    def __init__(self, ids: CallIds, max_calls: int | None = None) -> None:
        self.num_calls = 0
        self.is_in_call = False
        """The last call that the client gets is not complete."""
        self.is_in_reasoning = False
        """Set by the parser: between the tags that begin and end reasoning."""
        self._ids = ids
        self._max_calls = max_calls
        self._parts: list[Part] = []
        self._spaces: list[str] = []
        self._follows: type[Part] | None = None
        """The kind of the last part; None if there is none."""

    def content(self, text: str) -> None:
        self._text(text, Content)

    def reasoning(self, text: str) -> None:
        self._text(text, Reasoning)

    def _text(self, text: str, kind: type[Content] | type[Reasoning]) -> None:
        body = text.rstrip()
        if body:
            if kind is not self._follows and Reasoning in (kind, self._follows):
                body = body.lstrip()
            else:
                body = "".join(self._spaces) + body
            self._spaces.clear()
            self._write(kind(body))
        if spaces := text[len(text.rstrip()) :]:
            self._spaces.append(spaces)

    def start_call(self, name: str) -> None:
        self._spaces.clear()
        self._write(CallStart(self.num_calls, self._ids.id(self.num_calls), name))
        self.num_calls += 1
        self.is_in_call = self._max_calls is None or self.num_calls <= self._max_calls

    def arguments(self, text: str) -> None:
        """Adds to the arguments of the last call."""
        self._write(CallArguments(self.num_calls - 1, text))

    def end_call(self) -> None:
        """The arguments of the last call are complete. A call without arguments has an empty object
        of them."""
        if self._follows is CallStart:
            self.arguments("{}")
        self.is_in_call = False

    def finish(self) -> None:
        """Writes white space at the end, if it belongs to the content."""
        if self._follows in (None, Content) and self._spaces:
            self._write(Content("".join(self._spaces)))
        self._spaces.clear()

    def take(self) -> tuple[Part, ...]:
        """The parts since the last call of this method."""
        parts = joined(self._parts)
        self._parts.clear()
        return parts

    def _write(self, part: Part) -> None:
        self._follows = type(part)
        limit = self._max_calls
        if limit is None or isinstance(part, Content | Reasoning) or part.index < limit:
            self._parts.append(part)
