"""The client of a request: its output, its deadline, and whether it reads.

A client that lost its stream may continue the request with another call. That call then takes the
place of the first one.
"""

import asyncio
from collections.abc import Callable

from services.gateway.request.admitted import AdmittedRequest
from services.gateway.streaming.output import Output
from services.gateway.streaming.sequence import Sequence
from services.protocol.messages import Generated
from services.runtime.errors import DeadlineExceeded, DuplicateRequest, Overloaded


class Client:
    """Passes tokens to the client's output, and watches its deadline and its reading.

    Calls `on_read` when the client has read everything after backpressure was on, and `give_up`
    with an error when the deadline has passed or the client reads too slowly.
    """

    def __init__(
        self,
        request: AdmittedRequest,
        output: Output,
        read_window_s: float,
        on_read: Callable[[], None],
        give_up: Callable[[Exception], None],
    ) -> None:
        self._on_read = on_read
        self._give_up = give_up
        self._read_window_s = read_window_s
        self._pause_timer: asyncio.TimerHandle | None = None
        """Runs while backpressure is on."""
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._attach(request, output)

    def _attach(self, request: AdmittedRequest, output: Output) -> None:
        self.request, self.output = request, output
        output.on_read = self._has_read
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        deadline, loop = request.deadline, asyncio.get_running_loop()
        self._deadline_timer = (
            None if deadline is None else loop.call_at(deadline, self._deadline_passed)
        )

    def resume(self, request: AdmittedRequest, output: Output) -> bool:
        """Continue with another call of the client. `output` holds what the client has received and
        gets the rest; the deadline of the new call holds.

        True: the tokens that the client has not received must be computed again, because the client
        wants their logprobs and the gateway does not keep those. DuplicateRequest: the call is for
        another request.
        """
        before = self.output
        if not request.continues(self.request) or output.is_ahead_of(before):
            raise DuplicateRequest("the running request is not the one to continue")
        before.close(DuplicateRequest("another call continues this request"))
        self._attach(request, output)
        must_recompute = self.wants_logprobs and before.is_ahead_of(output)
        if not must_recompute:
            output.catch_up(before)
        self._has_read()
        return must_recompute

    def write(self, new: Generated) -> None:
        """Pass on the next tokens of a sequence that has not ended. If the client is behind,
        backpressure begins; if it is behind by more than MAX_UNREAD_TOKENS, the request is
        cancelled."""
        self.output.sequences[new.index].embedding = new.embedding
        self.output.write(new.index, new.token_ids, new.finish_reason, new.logprobs, new.score)
        if self.output.overflowing:
            self._cancel_slow_reader()
        elif self.output.congested and not self.is_paused:
            loop = asyncio.get_running_loop()
            self._pause_timer = loop.call_later(self._read_window_s, self._cancel_slow_reader)

    @property
    def unsent_prompt_logprobs(self) -> int | None:
        """How many of the likeliest tokens the logprobs of the prompt include; None: the client did
        not ask for prompt logprobs, or has them."""
        return None if self.output.has_begun else self.request.prompt_logprobs

    @property
    def wants_logprobs(self) -> bool:
        """Whether tokens that the client has not received need logprobs: because it asked for them,
        or because the best sequences are chosen by them."""
        request = self.request
        of_prompt = request.prompt_logprobs is not None and not request.has_received_tokens
        return request.sampling.logprobs is not None or of_prompt

    @property
    def living(self) -> tuple[Sequence, ...]:
        """The sequences that have not ended."""
        return self.output.living

    def living_sequence(self, index: int) -> Sequence | None:
        """The sequence with this index; None if it does not exist or has ended."""
        sequence = self._sequence(index)
        return None if sequence is None or sequence.has_ended else sequence

    def is_over(self, index: int) -> bool:
        """Whether a sequence with this index exists and has ended."""
        sequence = self._sequence(index)
        return sequence is not None and sequence.has_ended

    def _sequence(self, index: int) -> Sequence | None:
        sequences = self.output.sequences
        return sequences[index] if index < len(sequences) else None

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, and those received so far of the sequences that have not ended."""
        num_received = sum(len(sequence.tokens) for sequence in self.living)
        return len(self.request.prompt_token_ids) + num_received

    @property
    def is_paused(self) -> bool:
        """Whether backpressure is on: the client has not read everything yet."""
        return self._pause_timer is not None

    def timeout_ms(self) -> int:
        """Milliseconds until the deadline, at least 1; 0: the client set no deadline."""
        if self.request.deadline is None:
            return 0
        left_s = self.request.deadline - asyncio.get_running_loop().time()
        return max(1, round(left_s * 1000))

    def close(self, error: Exception | None) -> None:
        """End the output, with `error` if there is one, and stop the timers."""
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        self._end_pause()
        self.output.close(error)

    def _end_pause(self) -> None:
        if self._pause_timer is not None:
            self._pause_timer.cancel()
            self._pause_timer = None

    def _has_read(self) -> None:
        if self.is_paused:
            self._end_pause()
            self._on_read()

    def _cancel_slow_reader(self) -> None:
        self._give_up(Overloaded("the client reads too slowly; its request was cancelled", 0.0))

    def _deadline_passed(self) -> None:
        self._give_up(DeadlineExceeded("the request's deadline has passed"))
