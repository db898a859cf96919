"""Compares the stream that a client receives with the expected outputs."""

import time

from quire.types import Delta
from tests.chaos.cases import Case, Output


class Violation(Exception):
    """A client received something else than the expected stream."""


class ReceivedSequence:
    """The received part of one sequence."""

    def __init__(self, expected: Output) -> None:
        self._expected = expected
        self._text = ""
        self._has_ended = False
        self.num_tokens = 0

    def add(self, delta: Delta) -> str:
        """Add a delta; returns how it differs from the expected one, "" if it does not."""
        expected, first = self._expected, self.num_tokens
        end = first + len(delta.token_ids)
        if self._has_ended or delta.token_ids != expected.tokens[first:end]:
            return f"{delta.token_ids} and not {expected.tokens[first:end]}"
        if delta.logprobs != expected.logprobs[first:end]:
            return "other logprobs"
        self._text += delta.text
        if not expected.text.startswith(self._text):
            return f"the text {delta.text!r}"
        self.num_tokens, self._has_ended = end, delta.finish_reason is not None
        if not self._has_ended:
            return ""
        last = delta.finish_reason, delta.stopped_by, delta.score
        if last != (expected.finish_reason, expected.stopped_by, expected.score):
            return f"ended as {last}"
        return "" if self.is_whole else "ended early"

    @property
    def is_whole(self) -> bool:
        expected = self._expected
        received = self.num_tokens, self._text
        return self._has_ended and received == (len(expected.tokens), expected.text)

    def __str__(self) -> str:
        return f"{self.num_tokens} of {len(self._expected.tokens)}"


class ReceivedStream:
    """The received part of a stream. `longest_pause_s`: the longest time between two messages."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._sequences = [ReceivedSequence(output) for output in case.outputs]
        self._last_at: float | None = None
        self.num_messages = 0
        self.longest_pause_s = 0.0

    def add(self, delta: Delta) -> None:
        """Add a delta; Violation: it is not the expected one."""
        now = time.monotonic()
        self.longest_pause_s = max(self.longest_pause_s, now - (self._last_at or now))
        self._last_at = now
        if delta.prompt_logprobs != (() if self.num_messages else self._case.prompt_logprobs):
            raise Violation(f"{self}, with {len(delta.prompt_logprobs)} logprobs of the prompt")
        if not 0 <= delta.index < len(self._sequences):
            raise Violation(f"{self}, then an unknown sequence {delta.index}")
        before = str(self)
        if problem := self._sequences[delta.index].add(delta):
            raise Violation(f"{before}, then of sequence {delta.index}: {problem}")
        self.num_messages += 1

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all sequences."""
        return sum(sequence.num_tokens for sequence in self._sequences)

    def check_end(self) -> None:
        """Violation: the output is not complete."""
        if not all(sequence.is_whole for sequence in self._sequences):
            raise Violation(f"{self}, and then the end")

    def __str__(self) -> str:
        return " and ".join(map(str, self._sequences)) + " tokens"
