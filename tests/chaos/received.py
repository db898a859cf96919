"""Compares what a client receives of a stream with the expected answer."""

import time

from quire.types import Delta
from tests.chaos.cases import Case, Said


class Fault(Exception):
    """An observation that no client may make."""


class Part:
    """One sequence, as far as it was received."""

    def __init__(self, whole: Said) -> None:
        self._whole = whole
        self._text = ""
        self._has_ended = False
        self.num_tokens = 0

    def problem_of(self, delta: Delta) -> str:
        """How the delta differs from the expected one; "" if it does not, and it is added."""
        whole, first, end = self._whole, self.num_tokens, self.num_tokens + len(delta.token_ids)
        if self._has_ended or delta.token_ids != whole.tokens[first:end]:
            return f"{delta.token_ids} and not {whole.tokens[first:end]}"
        if delta.logprobs != whole.logprobs[first:end]:
            return "other logprobs"
        self._text += delta.text
        if not whole.text.startswith(self._text):
            return f"the last of them as {delta.text!r}"
        self.num_tokens, self._has_ended = end, delta.finish_reason is not None
        if not self._has_ended:
            return ""
        last = delta.finish_reason, delta.stopped_by, delta.score
        if last != (whole.finish_reason, whole.stopped_by, whole.score):
            return f"ended as {last}"
        return "" if self.is_whole else "ended before"

    @property
    def is_whole(self) -> bool:
        whole = self._whole
        told = self.num_tokens, self._text
        return self._has_ended and told == (len(whole.tokens), whole.text)

    def __str__(self) -> str:
        return f"{self.num_tokens} of {len(self._whole.tokens)}"


class Heard:
    """The received part of a stream. `longest_s`: the longest time between two messages."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._parts = [Part(whole) for whole in case.said]
        self._at: float | None = None
        self.num_messages = 0
        self.longest_s = 0.0

    def take(self, delta: Delta) -> None:
        """Add a delta; Fault: it is not the expected one."""
        now = time.monotonic()
        self.longest_s = max(self.longest_s, now - (self._at or now))
        self._at = now
        if delta.prompt_logprobs != (() if self.num_messages else self._case.prompt_logprobs):
            raise Fault(f"{self}, with {len(delta.prompt_logprobs)} logprobs of the prompt")
        if not 0 <= delta.index < len(self._parts):
            raise Fault(f"{self}, then something of a sequence {delta.index}")
        before = str(self)
        if problem := self._parts[delta.index].problem_of(delta):
            raise Fault(f"{before}, then of sequence {delta.index}: {problem}")
        self.num_messages += 1

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all sequences."""
        return sum(part.num_tokens for part in self._parts)

    def check_end(self) -> None:
        """Fault: the answer is not complete."""
        if not all(part.is_whole for part in self._parts):
            raise Fault(f"{self}, and then the end")

    def __str__(self) -> str:
        return " and ".join(map(str, self._parts)) + " tokens"
