"""Whom a request is for: the tokens it has, its deadline, and whether it reads.

Another call may go on for a client that has lost its stream; then that is the client.
"""

import asyncio
from collections.abc import Callable

from services.common.errors import DeadlineExceeded, DuplicateRequest, Overloaded
from services.common.logprobs import Logprobs
from services.common.ticket import FinishReason
from services.gateway.admission import Admitted
from services.gateway.output import Output
from services.gateway.pause import Pause


class Client:
    """`on_read`: it has read what there was after a pause. `give_up`: it is too late for it, or it
    reads too slowly."""

    def __init__(
        self,
        request: Admitted,
        output: Output,
        read_window_s: float,
        on_read: Callable[[], None],
        give_up: Callable[[Exception], None],
    ) -> None:
        self.tokens = list(request.received or ())
        self._on_read = on_read
        self._give_up = give_up
        self._pause = Pause(read_window_s, self._not_read)
        self._alarm: asyncio.TimerHandle | None = None
        self._attend(request, output)

    def _attend(self, request: Admitted, output: Output) -> None:
        self.request, self.output = request, output
        output.on_read = self._has_read
        if self._alarm is not None:
            self._alarm.cancel()
        deadline, loop = request.deadline, asyncio.get_running_loop()
        self._alarm = None if deadline is None else loop.call_at(deadline, self._too_late)

    def resume(self, request: Admitted, output: Output) -> bool:
        """Go on with another call: `output` gets what it has not received, and its deadline holds.
        True when the sequence ends with that. Nobody keeps logprobs: where they are asked for, what
        it has not received is forgotten, to be computed again. DuplicateRequest: that is another
        request."""
        received = request.received or ()
        num_received = len(received)
        so_far = tuple(self.tokens[:num_received])
        if not request.continues(self.request) or so_far != received:
            raise DuplicateRequest(f"another request with id {request.request_id!r} is running")
        self.output.close(DuplicateRequest("another call goes on with this request"))
        self._attend(request, output)
        self._has_read()
        if self.wants_logprobs:
            del self.tokens[num_received:]
        return output.write(tuple(self.tokens[num_received:]), None)

    def write(
        self,
        token_ids: tuple[int, ...],
        finish: FinishReason | None,
        logprobs: tuple[Logprobs, ...] = (),
    ) -> bool:
        """True when the sequence has ended. One that is too far behind pauses, or is given up."""
        self.tokens.extend(token_ids)
        if self.output.write(token_ids, finish, logprobs):
            return True
        if self.output.overflowing:
            self._not_read()
        elif self.output.congested:
            self._pause.begin()
        return False

    def write_prompt(self, logprobs: tuple[Logprobs, ...]) -> None:
        """Of its prompt, before its first token; they reach it together."""
        self.output.write_prompt(logprobs)

    @property
    def due_prompt_logprobs(self) -> int | None:
        """With how many of the likeliest tokens the logprobs of its prompt are to be told; None:
        they are not, or it has them."""
        return None if self.tokens else self.request.prompt_logprobs

    @property
    def wants_logprobs(self) -> bool:
        """Of what it has not received yet."""
        request = self.request
        return request.sampling.logprobs is not None or (
            request.prompt_logprobs is not None and not request.received
        )

    @property
    def num_tokens(self) -> int:
        """Of the prompt and received so far."""
        return len(self.request.prompt_token_ids) + len(self.tokens)

    @property
    def pauses(self) -> bool:
        """It has not read what there is."""
        return self._pause.is_on

    def timeout_ms(self) -> int:
        """What is left of its deadline; 0: it has none."""
        if self.request.deadline is None:
            return 0
        left_s = self.request.deadline - asyncio.get_running_loop().time()
        return max(1, round(left_s * 1000))

    def close(self, error: Exception | None) -> None:
        """Nothing more comes."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._pause.end()
        self.output.close(error)

    def _has_read(self) -> None:
        if self._pause.is_on:
            self._pause.end()
            self._on_read()

    def _not_read(self) -> None:
        text = "the client reads too slowly; its request was cancelled"
        self._give_up(Overloaded(text, 0.0))

    def _too_late(self) -> None:
        self._give_up(DeadlineExceeded("the request's deadline has passed"))
