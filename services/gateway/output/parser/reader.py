"""Reads a text that arrives in pieces as if all of it were there.

The methods of `Reader` are generators, which yield whenever they need more text. So a parser is
written as for a whole text, and its result does not depend on how the text is cut: a method looks
at the next characters only, and decides nothing that a later character could change. Each
character is read a bounded number of times.
"""

import json
import re
from collections.abc import Callable, Generator, Sequence
from functools import cache
from typing import TypeVar

T = TypeVar("T")

Reading = Generator[None, None, T]
"""Yields whenever it needs more text; its result is the generator's value."""

Sink = Callable[[str], None]

_CLOSING = {"{": "}", "[": "]", "(": ")"}
_SPACES = re.compile(r"\s+")
_NAME = re.compile(r"[\w.-]+")
_SCALAR = re.compile(r"[-+.\w]+")


class Malformed(Exception):
    """The text is not what the format of calls demands."""


class Reader:
    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self._has_ended = False
        self._held: list[str] | None = None

    def add(self, text: str) -> None:
        self._text, self._position = self._text[self._position :] + text, 0

    def end(self) -> None:
        """No more text will come."""
        self._has_ended = True

    def hold(self) -> None:
        """From here on, keep what is read, for `held`."""
        self._held = []

    def held(self) -> str:
        """The text that was read since `hold`; keep nothing more."""
        text, self._held = "".join(self._held or ()), None
        return text

    def take(self, num_chars: int) -> str:
        """Read characters that have been looked at."""
        text = self._text[self._position : self._position + num_chars]
        self._position += num_chars
        if self._held is not None:
            self._held.append(text)
        return text

    def peek(self) -> Reading[str]:
        """The next character; "" at the end."""
        while self._position == len(self._text) and not self._has_ended:
            yield
        return self._text[self._position : self._position + 1]

    def next_of(self, literals: Sequence[str]) -> Reading[str]:
        """Which of `literals` comes next, of several the first one; "": none."""
        while True:
            rest = self._text[self._position : self._position + max(map(len, literals))]
            for literal in literals:
                if rest.startswith(literal):
                    return literal
                if literal.startswith(rest) and not self._has_ended:
                    break  # more text decides
            else:
                return ""
            yield

    def skip(self, literal: str) -> Reading[bool]:
        """Read `literal` if it comes next. Returns whether it came."""
        found = yield from self.next_of((literal,))
        self.take(len(found))
        return bool(found)

    @property
    def was_cut(self) -> bool:
        """Whether the text ended, and all of it has been read."""
        return self._has_ended and self._position == len(self._text)

    def close(self, literal: str) -> Reading[bool]:
        """Read the mark that ends a call, or as much of it as there is when the text ends. Returns
        whether it came."""
        if (yield from self.skip(literal)):
            return True
        rest = self._text[self._position :]
        if not self._has_ended or not literal.startswith(rest):
            return False
        self.take(len(rest))
        return True

    def expect(self, literal: str) -> Reading[None]:
        """Read `literal`. Malformed: something else comes next."""
        if not (yield from self.skip(literal)):
            raise Malformed

    def ends_list(self) -> Reading[bool]:
        """After an item of a list: read what follows it, and hold if that ends the list. Malformed:
        it is neither a comma nor the end."""
        if (yield from self.skip_spaces()) == ",":
            self.take(1)
            yield from self.skip_spaces()
            return False
        yield from self.expect("]")
        self.hold()
        return True

    def skip_spaces(self) -> Reading[str]:
        """Read white space. Returns the character that follows; "" at the end."""
        yield from self._run(_SPACES, lambda _: None)
        return (yield from self.peek())

    def until(self, literals: Sequence[str], sink: Sink) -> Reading[str]:
        """Give `sink` the text before the first of `literals`. Returns that literal, which is not
        read yet; "": the text ended."""
        finder = _finder(tuple(literals))
        while True:
            match = finder.search(self._text, self._position)
            end = match.start() if match else len(self._text) - self._num_open(literals)
            if end > self._position:
                sink(self.take(end - self._position))
            if match:
                return match[0]
            if self._has_ended:
                return ""
            yield

    def _num_open(self, literals: Sequence[str]) -> int:
        """Length of the longest end of the text that may become one of `literals`."""
        if self._has_ended:
            return 0
        longest = max(map(len, literals), default=1) - 1
        for size in range(min(longest, len(self._text) - self._position), 0, -1):
            if any(literal.startswith(self._text[-size:]) for literal in literals):
                return size
        return 0

    def name(self) -> Reading[str]:
        """Read a name of letters, digits and `_.-`; it may be empty."""
        found: list[str] = []
        yield from self._run(_NAME, found.append)
        return "".join(found)

    def _run(self, pattern: re.Pattern[str], sink: Sink) -> Reading[None]:
        while (yield from self.peek()):
            match = pattern.match(self._text, self._position)
            if match is None:
                return
            sink(self.take(len(match[0])))

    def string(self) -> Reading[str]:
        """Read a JSON string. Returns its value."""
        found: list[str] = []
        if (yield from self.peek()) != '"':
            raise Malformed
        yield from self._quoted(found.append)
        try:
            value: str = json.loads("".join(found))
        except ValueError as error:
            raise Malformed from error
        return value

    def value(self, sink: Sink, quotes: str = '"') -> Reading[None]:
        """Give `sink` a JSON value as it is written: up to the bracket that closes it, or, if it
        has none, to the end of the string, number or word. Malformed: brackets do not match.

        `quotes` are the characters that begin and end a string.
        """
        open_brackets: list[str] = []
        between = _between(quotes)
        while True:
            char = yield from self.peek()
            if not char:
                raise Malformed
            if char in quotes:
                yield from self._quoted(sink)
            elif char in _CLOSING:
                open_brackets.append(_CLOSING[char])
                sink(self.take(1))
            elif char in "}])":
                if not open_brackets or open_brackets.pop() != char:
                    raise Malformed
                sink(self.take(1))
            elif open_brackets:
                yield from self._run(between, sink)
            elif _SCALAR.match(char):
                yield from self._run(_SCALAR, sink)
            else:
                raise Malformed
            if not open_brackets:
                return

    def _quoted(self, sink: Sink) -> Reading[None]:
        quote = yield from self.peek()
        plain = _plain(quote)
        sink(self.take(1))
        while True:
            yield from self._run(plain, sink)
            char = yield from self.peek()
            if not char:
                raise Malformed
            sink(self.take(1))
            if char == quote:
                return
            if not (yield from self.peek()):  # what a backslash escapes
                raise Malformed
            sink(self.take(1))


@cache
def _finder(literals: tuple[str, ...]) -> re.Pattern[str]:
    """Finds the first of the literals; of none of them: nothing."""
    return re.compile("|".join(map(re.escape, literals)) if literals else r"(?!)")


@cache
def _plain(quote: str) -> re.Pattern[str]:
    return re.compile(rf"[^\\{quote}]+")


@cache
def _between(quotes: str) -> re.Pattern[str]:
    return re.compile(rf"[^{quotes}(){{}}\[\]]+")
