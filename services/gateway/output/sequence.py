"""One sequence of a request's output: turns its tokens into text, and ends it at a stop string."""

from quire.types import Usage
from services.gateway.output.delta import Delta, PositionLogprobs, PromptReport, Received
from services.gateway.output.logprob_text import with_text
from services.gateway.output.parser.message import MessageParser
from services.gateway.output.parser.parts import Part, joined
from services.model.text.detokenizer import Detokenizer
from services.model.text.stop_strings import StopMatcher
from services.model.text.tokenizer import Tokenizer
from services.protocol.logprobs import Logprobs
from services.protocol.ticket import FinishReason
from services.runtime.errors import InvalidRequest

_LOGPROBS_A_TOKEN = 4
"""Unread logprobs that count as one unread token."""


class OutputSequence:
    """Collects the tokens of one sequence until the client reads them.

    `tokens` are all tokens from workers, also those after a stop string, which the client does not
    get. `worker_finish` is the finish reason that the worker reported, `finish_reason` the one that
    the client sees. `stop_token_ids` are the request's, to report the one that ended the sequence.
    `tokenizer` adds the text to logprobs; None if the client did not ask for logprobs. `parser`
    divides the text into the parts of a message; None if the client wants none. No stop string ends
    the sequence within its first `min_tokens` tokens. If stop strings are included in the text, so
    is the token that ends the sequence.
    """

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        stops: StopMatcher,
        stop_token_ids: frozenset[int],
        tokenizer: Tokenizer | None = None,
        parser: MessageParser | None = None,
        *,
        min_tokens: int = 0,
    ) -> None:
        self.index = index
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.worker_finish: FinishReason | None = None
        self.last_token_at: float | None = None
        self.score: float | None = None
        """The beam search's score; None for other requests."""
        self._num_reasoning_tokens = 0
        self._detokenizer = detokenizer
        self._stops = stops
        self._min_tokens = min_tokens
        self._num_chars = self._num_pushed = 0
        """Characters and tokens that became text, shown or not."""
        self._stop_token_ids = stop_token_ids
        self._tokenizer = tokenizer
        self._parser = parser
        self._unread_parts: list[Part] = []
        self._stopped_by: str | int | None = None
        self._unread_ids: list[int] = []
        self._unread_text: list[str] = []
        self._unread_logprobs: list[tuple[Logprobs, int]] = []
        self._end_is_sent = False

    @property
    def has_ended(self) -> bool:
        return self.finish_reason is not None

    @property
    def backlog(self) -> int:
        """Unread tokens, plus unread logprobs counted as tokens."""
        num_logprobs = sum(logprobs.num_entries for logprobs, _ in self._unread_logprobs)
        return len(self._unread_ids) + num_logprobs // _LOGPROBS_A_TOKEN

    @property
    def has_unread(self) -> bool:
        return bool(self._unread_ids) or (self.has_ended and not self._end_is_sent)

    def replay(self, received: Received) -> None:
        """Add the tokens, and perhaps the end, that the client has received, without sending them
        or their text again. Raises InvalidRequest if these tokens contain a stop string, so that
        nothing can follow."""
        if received.finish_reason is not None:
            self.tokens.extend(received.token_ids)
            self.finish_reason, self._end_is_sent = received.finish_reason, True
            return
        self.write(received.token_ids, None)
        if self.has_ended:
            raise InvalidRequest("a stop string is in the tokens received: the sequence has ended")
        self._forget_unread()

    def is_prefix_of(self, other: "OutputSequence") -> bool:
        """Whether `other` has all tokens of this sequence, and its end if this one has ended."""
        num_tokens = len(self.tokens)
        return self.tokens == other.tokens[:num_tokens] and self.has_ended <= other.has_ended

    def write(
        self,
        token_ids: tuple[int, ...],
        finish: FinishReason | None,
        logprobs: tuple[Logprobs, ...] = (),
    ) -> int:
        """Add the next tokens, with their logprobs if the client asked for them; `finish` comes
        with the last ones. The sequence ends by `finish` or at a stop string.

        Returns how many of the tokens the client gets: those after a stop string are dropped.
        """
        parser, offsets = self._parser, []
        self.tokens.extend(token_ids)
        self.worker_finish = finish
        num_taken = len(token_ids)
        hides_last = finish is FinishReason.STOP and not self._stops.included
        num_shown = num_taken - hides_last
        for position, token_id in enumerate(token_ids[:num_shown], 1):
            offsets.append(self._num_chars)
            self._num_pushed += 1
            was_in_reasoning = parser is not None and parser.is_in_reasoning
            is_stopped = self._add_text(self._detokenizer.push((token_id,)))
            if parser is not None:
                self._num_reasoning_tokens += was_in_reasoning and parser.is_in_reasoning
            if is_stopped:
                num_taken = position
                break
        offsets += [self._num_chars] * (num_taken - len(offsets))
        self._unread_ids.extend(token_ids[:num_taken])
        if self._tokenizer is not None:  # only once the client reads them they become text
            self._unread_logprobs.extend(zip(logprobs[:num_taken], offsets, strict=False))
        if finish is not None and not self.has_ended:
            self._finish(finish, token_ids)
        return num_taken

    def take(self, request_id: str, usage: Usage | None, prompt: PromptReport | None) -> Delta:
        """Everything that the client has not read yet, as one delta."""
        delta = Delta(
            request_id=request_id,
            index=self.index,
            token_ids=tuple(self._unread_ids),
            text="".join(self._unread_text),
            finish_reason=self.finish_reason,
            stopped_by=self._stopped_by,
            usage=usage,
            logprobs=self._take_logprobs(),
            prompt=prompt,
            score=self.score,
            parts=None if self._parser is None else joined(self._unread_parts),
            has_calls=self._parser is not None and self._parser.has_calls,
            is_in_call=self._parser is not None and self._parser.is_in_call,
            num_reasoning_tokens=self._num_reasoning_tokens,
        )
        self._forget_unread()
        self._end_is_sent = self.has_ended
        return delta

    def _forget_unread(self) -> None:
        self._unread_ids.clear()
        self._unread_text.clear()
        self._unread_parts.clear()
        self._unread_logprobs.clear()

    def _take_logprobs(self) -> tuple[PositionLogprobs, ...]:
        if self._tokenizer is None or not self._unread_logprobs:
            return ()
        unread = zip(self._unread_ids, self._unread_logprobs, strict=True)
        return tuple(with_text(self._tokenizer, token_id, *each) for token_id, each in unread)

    def _add_text(self, text: str, finish: FinishReason | None = None) -> bool:
        """Add to the sequence's text. The client gets the part that is certain now, and all of it
        if the text is the last, with the worker's `finish`. True: a stop string ended the
        sequence."""
        self._num_chars += len(text)
        scanned = self._stops.push(text, may_end=self._num_pushed > self._min_tokens)
        is_stopped, shown = scanned.stop is not None, scanned.text
        if finish is not None and not is_stopped:
            shown += self._stops.flush()
        if shown:
            self._unread_text.append(shown)
        if self._parser is not None:
            if shown:
                self._unread_parts.extend(self._parser.push(shown))
            if is_stopped or finish is not None:
                by_token = finish is FinishReason.STOP and not is_stopped
                self._unread_parts.extend(self._parser.finish(by_token=by_token))
        if is_stopped:
            self.finish_reason, self._stopped_by = FinishReason.STOP, scanned.stop
        return is_stopped

    def _finish(self, finish: FinishReason, token_ids: tuple[int, ...]) -> None:
        """End the sequence as the worker says, with the text that was held back; if that text
        completes a stop string, the stop string ends it instead."""
        if self._add_text(self._detokenizer.flush(), finish):
            return
        self.finish_reason = finish
        last = token_ids[-1] if token_ids else None
        if finish is FinishReason.STOP and last in self._stop_token_ids:
            self._stopped_by = last
