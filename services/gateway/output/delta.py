"""The deltas that the client of a request gets, and the part of an answer that the client says it
received before its stream broke."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from quire import types
from quire.types import Usage
from services.gateway.output.parser.parts import Content, Part
from services.protocol.logprobs import MAX_LOGPROBS, LogprobColumns
from services.protocol.ticket import FinishReason


@dataclass(frozen=True, slots=True)
class Received:
    """The part of one sequence that the client received before its stream broke."""

    index: int
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    """Set if the client received the whole sequence."""


@dataclass(frozen=True, slots=True)
class PositionLogprobs(types.TokenLogprobs):
    """The logprobs of one position."""

    text_offset: int
    """Number of characters of the text before the token."""


@dataclass(frozen=True, slots=True)
class PromptReport:
    """The prompt, as reported to a client that asked for an echo or for prompt logprobs."""

    text: str
    token_ids: tuple[int, ...]
    tokens: Mapping[int, bytes]
    """The bytes of each token of the report, as in `Candidate.token`, by token id."""
    offsets: Callable[[], Sequence[int]]
    """Counts the characters of the text before each token."""
    logprobs: LogprobColumns | None = None
    """The logprobs of each token except the first; None if the client asked for none, or the prompt
    has one token."""

    def entries(self, num_top: int = MAX_LOGPROBS) -> Iterator[list[tuple[int, float, int]]]:
        """The (token id, logprob, rank) of each token except the first, and behind it those of the
        `num_top` likeliest tokens of its position."""
        if (found := self.logprobs) is None:
            return
        ids = np.column_stack([self.token_ids[1:], found.top_token_ids[:, :num_top]])
        values = np.column_stack([found.logprobs, found.top_logprobs[:, :num_top]])
        counts = range(1, ids.shape[1])
        columns = zip(ids.tolist(), values.tolist(), found.ranks.tolist(), strict=True)
        for token_ids, logprobs, rank in columns:
            yield list(zip(token_ids, logprobs, (rank, *counts), strict=True))


@dataclass(frozen=True, slots=True)
class Delta:
    """The tokens and the text that a sequence gained since its previous delta."""

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    text: str
    """Whole characters only. No part of a stop string, unless the request asks to include it."""
    finish_reason: FinishReason | None = None
    """Set in the last delta of a sequence."""
    stopped_by: str | int | None = None
    """The stop string or stop token id that ended the sequence, in its last delta."""
    usage: Usage | None = None
    """In the last delta of the request; with `running_usage` in every delta."""
    logprobs: tuple[PositionLogprobs, ...] = ()
    """One for each token, if the request asks for logprobs."""
    prompt: PromptReport | None = None
    """In the first delta of the request, if it asks for the prompt or its logprobs."""
    score: float | None = None
    """The sequence's score, if a beam search found it."""
    parts: tuple[Part, ...] | None = None
    """The parts of the message that `text` completes; None if the message is not parsed."""
    has_calls: bool = False
    """Whether the message has a tool call so far."""
    is_in_call: bool = False
    """Whether the last of these calls is not complete. In the last delta of a sequence: its end has
    cut the call."""
    num_reasoning_tokens: int = 0
    """Tokens of the sequence so far between the tags that begin and end reasoning."""

    @property
    def ends_with_calls(self) -> bool:
        """Whether the message has ended with calls that are complete, so that the client should run
        them. Every answer takes its reason for the end from here."""
        has_stopped = self.finish_reason is FinishReason.STOP
        return has_stopped and self.has_calls and not self.is_in_call

    @property
    def message_parts(self) -> tuple[Part, ...]:
        """The parts of the message; its text if it is not parsed."""
        return (Content(self.text),) if self.parts is None else self.parts


def joined(deltas: Sequence[Delta], prompt: PromptReport | None = None) -> Delta:
    """All deltas of a sequence as one, with the report of its prompt."""
    parts = tuple(chain.from_iterable(each.parts or () for each in deltas))
    return replace(
        deltas[-1],
        token_ids=tuple(chain.from_iterable(each.token_ids for each in deltas)),
        text="".join(each.text for each in deltas),
        logprobs=tuple(chain.from_iterable(each.logprobs for each in deltas)),
        prompt=prompt,
        parts=None if deltas[-1].parts is None else parts,
    )
