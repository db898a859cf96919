"""The output of a request: a bounded buffer of tokens, read as deltas of its sequences.

Workers' events write to it and the client reads from it. All tokens of a sequence that the client
has not read yet become one delta, so a token costs less, not more, when the client or the event
loop is behind.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from quire.types import RequestMetrics, RetainAnswer, Usage
from services.gateway.output.delta import Delta, Received
from services.gateway.output.logprob_text import PromptReporter
from services.gateway.output.rests import WriteRests
from services.gateway.output.sequence import OutputSequence
from services.protocol.logprobs import LogprobColumns
from services.protocol.messages import Generated
from services.protocol.ticket import FinishReason

MAX_UNREAD_TOKENS = 8192
"""Unread tokens of one sequence above which a request is cancelled."""

MAX_STALL_S = 15.0
"""The longest time between two reads of a client before its request is cancelled. The request's
tokens that arrive are the moments at which it is checked."""


class Meter(Protocol):
    """Records a model's token metrics; see `services.gateway.request.metrics`."""

    def first_token(self, after_s: float) -> None:
        """A request got its first token, of any sequence, `after_s` seconds after its arrival."""

    def tokens(self, num_tokens: int, after_s: float | None) -> None:
        """A sequence got tokens `after_s` seconds after its last token; None if they are its
        first."""


@dataclass(slots=True)
class RequestStats:
    """Counts and times of one request, for its usage, metrics and log line."""

    num_prompt_tokens: int
    arrived_at: float
    reports_cached: bool = True
    """Whether the client may know `num_cached_tokens`."""
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_moves: int = 0
    num_accepted_drafts: int = 0
    num_rejected_drafts: int = 0
    first_token_at: float | None = None
    last_token_at: float | None = None
    prefilled: bool = False
    block_size: int = 0
    """Of the pool that computes the prompt; 0 before it is chosen."""
    retained: tuple[RetainAnswer, ...] = ()
    """The answers to the request's wishes to retain prefixes."""

    def note_prefill(self, num_cached_tokens: int) -> None:
        """Note the cached tokens of the first prefill, also if it does not come to its end. Later
        ones find what this request computed itself, and do not count."""
        if not self.prefilled:
            self.prefilled = True
            self.num_cached_tokens = min(num_cached_tokens, self.num_prompt_tokens)

    def add_call(self, before: "RequestStats") -> None:
        """Note what an earlier call of the same request has computed, and what happened to it."""
        self.prefilled = before.prefilled
        self.num_cached_tokens, self.block_size = before.num_cached_tokens, before.block_size
        self.retained = before.retained
        self.num_preemptions, self.num_moves = before.num_preemptions, before.num_moves
        self.num_accepted_drafts = before.num_accepted_drafts
        self.num_rejected_drafts = before.num_rejected_drafts

    @property
    def num_written_tokens(self) -> int:
        """The prompt tokens that were computed into full blocks, which the prefix cache keeps."""
        if not self.prefilled or not self.block_size:
            return 0
        num_cached_blocks = -(-self.num_cached_tokens // self.block_size)
        num_full_blocks = self.num_prompt_tokens // self.block_size
        return max(0, num_full_blocks - num_cached_blocks) * self.block_size

    @property
    def time_to_first_token_s(self) -> float:
        return 0.0 if self.first_token_at is None else self.first_token_at - self.arrived_at

    @property
    def generation_time_s(self) -> float:
        """From the first token to the last one so far."""
        return (self.last_token_at or 0.0) - (self.first_token_at or 0.0)

    def usage(self, metrics: RequestMetrics | None = None) -> Usage:
        return Usage(
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens if self.reports_cached else None,
            num_generated_tokens=self.num_generated_tokens,
            time_to_first_token_ms=self.time_to_first_token_s * 1000,
            num_preemptions=self.num_preemptions,
            num_accepted_drafts=self.num_accepted_drafts,
            num_rejected_drafts=self.num_rejected_drafts,
            metrics=metrics,
            num_written_tokens=self.num_written_tokens if self.reports_cached else None,
            retained=self.retained,
        )


class Output:
    """The output of one request, with its `sequences` by index.

    `prompt` reports the prompt in the first delta; it is None if the client did not ask for that.
    `rests` is None if each delta is written at once.
    """

    def __init__(
        self,
        request_id: str,
        stats: RequestStats,
        sequences: Seq[OutputSequence],
        meter: Meter,
        clock: Callable[[], float],
        prompt: PromptReporter | None = None,
        rests: WriteRests | None = None,
    ) -> None:
        self.stats = stats
        self.sequences = tuple(sequences)
        self.living = self.sequences
        """The sequences that have not ended."""
        self.finish_reason: FinishReason | None = None
        """The finish reason of the last sequence; None until all have ended."""
        self.running_usage = False
        """Whether every delta has the usage, not only the last."""
        self._request_id = request_id
        self._read_order = deque(sequences)
        """The sequences in the order in which the client gets their next deltas."""
        self._unsent_prompt = prompt
        self._prompt_logprobs: LogprobColumns | None = None
        self._rests = rests
        self._meter = meter
        self._clock = clock
        self._closed = False
        self._error: Exception | None = None
        self._readable = asyncio.Event()
        self._given_at: float | None = None
        """When the reader got a delta; None once it has asked for the next one."""
        self.metrics: Callable[[], RequestMetrics] | None = None
        """Makes the request's figures for the last delta; None if the client does not get them."""

    @property
    def has_ended(self) -> bool:
        return self.finish_reason is not None

    @property
    def is_neglected(self) -> bool:
        """Whether the client reads too slowly: the largest backlog of a sequence that has not
        ended, or the time of the delta that the client has, is beyond its limit."""
        given_at = self._given_at
        is_stalled = given_at is not None and self._clock() - given_at > MAX_STALL_S
        backlog = max((sequence.backlog for sequence in self.living), default=0)
        return is_stalled or backlog > MAX_UNREAD_TOKENS

    @property
    def has_begun(self) -> bool:
        """Whether any sequence has a token."""
        return any(sequence.tokens for sequence in self.sequences)

    def replay(self, received: Seq[Received]) -> None:
        """Add the tokens that the client has received, without sending them again. Raises
        InvalidRequest if these tokens contain a stop string, so that nothing can follow."""
        for each in received:
            self.sequences[each.index].replay(each)
            self.stats.num_generated_tokens += len(each.token_ids)
        self._drop_ended()

    def is_ahead_of(self, other: "Output") -> bool:
        """Whether this output has tokens, or the end of a sequence, that `other` does not have, or
        different tokens."""
        pairs = zip(self.sequences, other.sequences, strict=True)
        return not all(ours.is_prefix_of(theirs) for ours, theirs in pairs)

    def catch_up(self, other: "Output") -> None:
        """Write the tokens that this output does not have yet, from the output of an earlier call
        of the same request."""
        for sequence in self.living:
            old, so_far = other.sequences[sequence.index], len(sequence.tokens)
            rest = tuple(old.tokens[so_far:])
            finish = old.worker_finish
            self.write(Generated(self._request_id, 0, sequence.index, so_far, rest, finish))

    def is_over(self, index: int) -> bool:
        """Whether a sequence with this index exists and has ended."""
        return index < len(self.sequences) and self.sequences[index].has_ended

    def write(self, new: Generated) -> None:
        """Add the next tokens of a sequence that has not ended."""
        sequence = self.sequences[new.index]
        sequence.score = new.score
        num_taken = sequence.write(new.token_ids, new.finish_reason, new.logprobs)
        self.stats.num_accepted_drafts += new.num_accepted
        self.stats.num_rejected_drafts += new.num_drafts - new.num_accepted
        self._count(sequence, num_taken)
        if sequence.has_ended:
            self._drop_ended()
            if not self.living:
                self.finish_reason = sequence.finish_reason
        self._readable.set()

    def write_prompt(self, logprobs: LogprobColumns) -> None:
        """Store the logprobs of the prompt, which arrive with the first token."""
        self._prompt_logprobs = logprobs

    def close(self, error: Exception | None) -> None:
        """End the output. With an error, the reader gets the error in place of unread tokens."""
        self._closed = True
        self._error = error
        self._readable.set()

    def __aiter__(self) -> "Output":
        """Iterate over deltas until the end, in turn from the sequences with unread tokens."""
        return self

    async def __anext__(self) -> Delta:
        """Raises the error that `close` was given."""
        self._given_at = None
        while True:  # While the reader has a delta or rests, more tokens may arrive, or the end.
            if self._error is not None:
                raise self._error
            if not any(sequence.has_unread for sequence in self._read_order):
                if self._closed:
                    raise StopAsyncIteration
                self._readable.clear()
                await self._readable.wait()
                continue
            if self._rests is not None:
                await self._rests.wait()
            sequence = self._next_unread()
            if sequence is not None and self._error is None:
                self._given_at = self._clock()
                return self._take(sequence)

    def _drop_ended(self) -> None:
        self.living = tuple(sequence for sequence in self.living if not sequence.has_ended)

    def _next_unread(self) -> OutputSequence | None:
        for _ in range(len(self._read_order)):
            sequence = self._read_order[0]
            self._read_order.rotate(-1)
            if sequence.has_unread:
                return sequence
        return None

    def _take(self, sequence: OutputSequence) -> Delta:
        is_last = not self.living and not any(
            other.has_unread for other in self._read_order if other is not sequence
        )
        metrics = self.metrics() if is_last and self.metrics is not None else None
        usage = self.stats.usage(metrics) if is_last or self.running_usage else None
        prompt = self._unsent_prompt
        report = None if prompt is None else prompt.report(self._prompt_logprobs)
        self._unsent_prompt = self._prompt_logprobs = None
        return sequence.take(self._request_id, usage, report)

    def _count(self, sequence: OutputSequence, num_tokens: int) -> None:
        if not num_tokens:
            return
        stats, now, before = self.stats, self._clock(), sequence.last_token_at
        if stats.first_token_at is None:
            stats.first_token_at = now
            self._meter.first_token(now - stats.arrived_at)
        self._meter.tokens(num_tokens, None if before is None else now - before)
        sequence.last_token_at = stats.last_token_at = now
        stats.num_generated_tokens += num_tokens
