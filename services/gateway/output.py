"""What the client of a request gets: text out of tokens, cut at stop strings, in a bounded buffer.

Workers write, the client reads; what it has not read yet becomes one delta, so that a client (or an
event loop) that is behind costs less per token, not more.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Protocol

from services.common.errors import InvalidRequest
from services.common.logprobs import Logprobs
from services.common.text.stop_strings import Scanned
from services.common.ticket import FinishReason
from services.gateway.api import Delta, PromptReport, TokenLogprobs, Usage
from services.gateway.spelling import PromptTeller, Speller
from services.gateway.text import Text

PAUSE_UNREAD_TOKENS = 1024
"""A client that leaves more than this unread does not keep up: its request pauses."""

MAX_UNREAD_TOKENS = 8192
"""More than this is cancelled, should a worker not let go of what is to pause."""

_LOGPROBS_A_TOKEN = 4
"""So many unread logprobs count as one more unread token."""


class Meter(Protocol):
    """Where figures go; `services.gateway.figures`."""

    def first_token(self, after_s: float) -> None: ...

    def tokens(self, num_tokens: int, after_s: float) -> None: ...


@dataclass(slots=True)
class Tally:
    """What usage is made of."""

    num_prompt_tokens: int
    arrived_at: float
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_moves: int = 0
    first_token_at: float | None = None
    last_token_at: float = 0.0
    prefilled: bool = False

    def saw_prefill(self, num_cached_tokens: int) -> None:
        """Only the first prefill found anything that others had computed."""
        if not self.prefilled:
            self.prefilled = True
            self.num_cached_tokens = num_cached_tokens

    @property
    def time_to_first_token_s(self) -> float:
        return 0.0 if self.first_token_at is None else self.first_token_at - self.arrived_at

    def usage(self) -> Usage:
        return Usage(
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_generated_tokens=self.num_generated_tokens,
            time_to_first_token_ms=self.time_to_first_token_s * 1000,
            num_preemptions=self.num_preemptions,
        )


class Output:
    """One sequence's. `stop_token_ids`: those of the request, to say what stopped it. `speller`:
    where the client asks for logprobs. `prompt`: where it asks for those of its prompt."""

    def __init__(
        self,
        request_id: str,
        tally: Tally,
        text: Text,
        stop_token_ids: tuple[int, ...],
        meter: Meter,
        clock: Callable[[], float],
        speller: Speller | None = None,
        prompt: PromptTeller | None = None,
    ) -> None:
        self.tally = tally
        self.cumulative_logprob = 0.0
        """Of all tokens written, as far as their logprobs came with them."""
        self.finish_reason: FinishReason | None = None
        self._request_id = request_id
        self._text = text
        self._stop_token_ids = frozenset(stop_token_ids)
        self._meter = meter
        self._clock = clock
        self._speller = speller
        self._untold_prompt = prompt
        self._prompt_logprobs: tuple[Logprobs, ...] = ()
        self._unread_logprobs: list[tuple[Logprobs, int]] = []
        self._unread_ids: list[int] = []
        self._unread_text: list[str] = []
        self._stopped_by: str | int | None = None
        self._closed = False
        self._error: Exception | None = None
        self._readable = asyncio.Event()
        self.on_read: Callable[[], None] = lambda: None
        """Called when the reader has taken all that there was."""

    @property
    def congested(self) -> bool:
        return self._num_unread > PAUSE_UNREAD_TOKENS

    @property
    def overflowing(self) -> bool:
        return self._num_unread > MAX_UNREAD_TOKENS

    @property
    def _num_unread(self) -> int:
        num_logprobs = sum(logprobs.num_entries for logprobs, _ in self._unread_logprobs)
        return len(self._unread_ids) + num_logprobs // _LOGPROBS_A_TOKEN

    def replay(self, token_ids: tuple[int, ...]) -> None:
        """Take what the client has already, text and all. InvalidRequest: nothing could follow."""
        if any(self._show(self._text.push(token_id)) for token_id in token_ids):
            raise InvalidRequest("a stop string is in the tokens received: the request has ended")
        self._unread_text.clear()
        self.tally.num_generated_tokens = len(token_ids)

    def write(
        self,
        token_ids: tuple[int, ...],
        finish: FinishReason | None,
        logprobs: tuple[Logprobs, ...] = (),
    ) -> bool:
        """Take the next tokens, with their logprobs if they were asked for; `finish` comes with the
        last. True when the sequence has ended, by `finish` or by a stop string; tokens that follow
        a stop string are dropped."""
        offsets = []
        num_written = len(token_ids)
        ends_unseen = finish is FinishReason.STOP and not self._text.shows_end
        num_shown = num_written - ends_unseen
        for position, token_id in enumerate(token_ids[:num_shown], 1):
            offsets.append(self._text.num_chars)
            if self._show(self._text.push(token_id)):
                num_written = position
                break
        offsets += [self._text.num_chars] * (num_written - len(offsets))
        self._unread_ids.extend(token_ids[:num_written])
        self._keep(logprobs[:num_written], offsets)
        self._count(num_written)
        if finish is not None and self.finish_reason is None:
            self._conclude(finish, token_ids)
        self._readable.set()
        return self.finish_reason is not None

    def write_prompt(self, logprobs: tuple[Logprobs, ...]) -> None:
        """Of the prompt; they come with the first token."""
        self._prompt_logprobs = logprobs

    def close(self, error: Exception | None) -> None:
        """Nothing more comes. With an error the reader gets it in place of what it has not read."""
        self._closed = True
        self._error = error
        self._readable.set()

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """What was written, until the end. Raises what `close` was given."""
        told_end = False
        while True:  # While the reader has a delta more may come, and the end.
            if self._error is not None:
                raise self._error
            if self._unread_ids or (self.finish_reason is not None and not told_end):
                told_end = self.finish_reason is not None
                yield self._take()
            elif self._closed:
                return
            else:
                self._readable.clear()
                await self._readable.wait()

    def _count(self, num_tokens: int) -> None:
        if not num_tokens:
            return
        tally, now = self.tally, self._clock()
        if tally.first_token_at is None:
            tally.first_token_at = now
            self._meter.first_token(now - tally.arrived_at)
        else:
            self._meter.tokens(num_tokens, now - tally.last_token_at)
        tally.last_token_at = now
        tally.num_generated_tokens += num_tokens

    def _keep(self, logprobs: tuple[Logprobs, ...], offsets: list[int]) -> None:
        """Until they are read; they are spelled out only then."""
        self.cumulative_logprob += sum(each.logprob for each in logprobs)
        if self._speller is not None:
            self._unread_logprobs.extend(zip(logprobs, offsets, strict=False))

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

    def _take(self) -> Delta:
        delta = Delta(
            request_id=self._request_id,
            index=0,
            token_ids=tuple(self._unread_ids),
            text="".join(self._unread_text),
            finish_reason=self.finish_reason,
            stopped_by=self._stopped_by,
            usage=self.tally.usage() if self.finish_reason else None,
            logprobs=self._spelled(),
            prompt=self._told_prompt(),
        )
        self._unread_ids.clear()
        self._unread_text.clear()
        self._unread_logprobs.clear()
        self.on_read()
        return delta

    def _spelled(self) -> tuple[TokenLogprobs, ...]:
        if self._speller is None or not self._unread_logprobs:
            return ()
        unread = zip(self._unread_ids, self._unread_logprobs, strict=True)
        return tuple(self._speller.spell(token_id, *kept) for token_id, kept in unread)

    def _told_prompt(self) -> PromptReport | None:
        prompt, logprobs = self._untold_prompt, self._prompt_logprobs
        self._untold_prompt, self._prompt_logprobs = None, ()
        return None if prompt is None else prompt.report(logprobs)
