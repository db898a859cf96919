"""One sequence of a request, as its client gets it: text out of tokens, cut at stop strings.

See ADR 77.
"""

from services.common.errors import InvalidRequest
from services.common.text.stop_strings import Scanned
from services.gateway.frontend.api import Delta, PromptReport, Received, TokenLogprobs, Usage
from services.gateway.streaming.logprob_text import LogprobText
from services.gateway.streaming.text import Text
from services.protocol.logprobs import Logprobs
from services.protocol.ticket import FinishReason

_LOGPROBS_A_TOKEN = 4
"""So many unread logprobs count as one more unread token."""


class Sequence:
    """`tokens`: all that workers gave it, those behind a stop string too, which nobody is shown.
    `worker_finish`: the worker's word that it has ended; `finish_reason`: how it did, for its
    client. `stop_token_ids`: those of the request, to say what stopped it. `logprob_text`: where
    the client asks for logprobs."""

    def __init__(
        self,
        index: int,
        text: Text,
        stop_token_ids: frozenset[int],
        logprob_text: LogprobText | None = None,
    ) -> None:
        self.index = index
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.worker_finish: FinishReason | None = None
        self.last_token_at: float | None = None
        self.cumulative_logprob = 0.0
        """Of all tokens that the client gets, as far as their logprobs came with them."""
        self._num_logprobs = 0
        self.score: float | None = None
        """Of one that a beam search found."""
        self._text = text
        self._stop_token_ids = stop_token_ids
        self._logprob_text = logprob_text
        self._stopped_by: str | int | None = None
        self._unread_ids: list[int] = []
        self._unread_text: list[str] = []
        self._unread_logprobs: list[tuple[Logprobs, int]] = []
        self._end_is_told = False

    @property
    def has_ended(self) -> bool:
        return self.finish_reason is not None

    @property
    def mean_logprob(self) -> float:
        """Of those; the token that ended it is one of them."""
        return self.cumulative_logprob / max(self._num_logprobs, 1)

    @property
    def num_unread(self) -> int:
        """Tokens that its client has not taken yet."""
        return len(self._unread_ids)

    @property
    def backlog(self) -> int:
        """The same in tokens, with what is told of them."""
        num_logprobs = sum(logprobs.num_entries for logprobs, _ in self._unread_logprobs)
        return len(self._unread_ids) + num_logprobs // _LOGPROBS_A_TOKEN

    @property
    def has_news(self) -> bool:
        return bool(self._unread_ids) or (self.has_ended and not self._end_is_told)

    def replay(self, received: Received) -> None:
        """Take what the client has already, text and all, and the end if it has that.
        InvalidRequest: nothing could follow."""
        self.tokens.extend(received.token_ids)
        if received.finish_reason is not None:
            self.finish_reason, self._end_is_told = received.finish_reason, True
            return
        if any(self._show(self._text.push(token_id)) for token_id in received.token_ids):
            raise InvalidRequest("a stop string is in the tokens received: the sequence has ended")
        self._unread_text.clear()

    def goes_on_as(self, other: "Sequence") -> bool:
        """Whether `other` has got all that this one has, and perhaps more."""
        num_tokens = len(self.tokens)
        is_its_end = other.has_ended or not self.has_ended
        return self.tokens == other.tokens[:num_tokens] and is_its_end

    def write(
        self,
        token_ids: tuple[int, ...],
        finish: FinishReason | None,
        logprobs: tuple[Logprobs, ...] = (),
    ) -> int:
        """Take the next tokens, with their logprobs if they were asked for; `finish` comes with the
        last. It ends by `finish` or by a stop string. How many the client gets: tokens that follow
        a stop string are dropped."""
        offsets = []
        self.tokens.extend(token_ids)
        self.worker_finish = finish
        num_taken = len(token_ids)
        ends_unseen = finish is FinishReason.STOP and not self._text.shows_end
        num_shown = num_taken - ends_unseen
        for position, token_id in enumerate(token_ids[:num_shown], 1):
            offsets.append(self._text.num_chars)
            if self._show(self._text.push(token_id)):
                num_taken = position
                break
        offsets += [self._text.num_chars] * (num_taken - len(offsets))
        self._unread_ids.extend(token_ids[:num_taken])
        self._keep(logprobs[:num_taken], offsets)
        if finish is not None and not self.has_ended:
            self._conclude(finish, token_ids)
        return num_taken

    def take(self, request_id: str, usage: Usage | None, prompt: PromptReport | None) -> Delta:
        """What the client has not read yet."""
        delta = Delta(
            request_id=request_id,
            index=self.index,
            token_ids=tuple(self._unread_ids),
            text="".join(self._unread_text),
            finish_reason=self.finish_reason,
            stopped_by=self._stopped_by,
            usage=usage,
            logprobs=self._spelled(),
            prompt=prompt,
            score=self.score,
        )
        self._unread_ids.clear()
        self._unread_text.clear()
        self._unread_logprobs.clear()
        self._end_is_told = self.has_ended
        return delta

    def _keep(self, logprobs: tuple[Logprobs, ...], offsets: list[int]) -> None:
        """Until they are read; they are spelled out only then."""
        self._num_logprobs += len(logprobs)
        for each in logprobs:  # one by one: the sum is the same however they came
            self.cumulative_logprob += each.logprob
        if self._logprob_text is not None:
            self._unread_logprobs.extend(zip(logprobs, offsets, strict=False))

    def _spelled(self) -> tuple[TokenLogprobs, ...]:
        if self._logprob_text is None or not self._unread_logprobs:
            return ()
        unread = zip(self._unread_ids, self._unread_logprobs, strict=True)
        return tuple(self._logprob_text.spell(token_id, *kept) for token_id, kept in unread)

    def _show(self, scanned: Scanned) -> bool:
        """Add to the client's text; True when a stop string ended it."""
        if scanned.text:
            self._unread_text.append(scanned.text)
        if scanned.stop is None:
            return False
        self.finish_reason, self._stopped_by = FinishReason.STOP, scanned.stop
        return True

    def _conclude(self, finish: FinishReason, token_ids: tuple[int, ...]) -> None:
        """The worker's end of the sequence; what was held back comes out, unless that is a stop."""
        if self._show(self._text.flush()):
            return
        self.finish_reason = finish
        last = token_ids[-1] if token_ids else None
        if finish is FinishReason.STOP and last in self._stop_token_ids:
            self._stopped_by = last
