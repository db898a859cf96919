"""Lets a client's stream survive the loss of its gateway: keeps the received tokens, and decides
whether and when to ask the next gateway to resume.

See ADR 62.
"""

import secrets
import time
from collections.abc import Callable, Iterable

from quire import messages
from quire.errors import STOPPING, DeadlineExceeded, QuireError, Unavailable, Unreachable
from quire.messages import Request
from quire.v1.inference_pb2 import GenerateRequest, GenerateResponse, ReceivedSequence

ACCEPTED_METADATA = "quire-accepted"
"""Key of the initial metadata with which a gateway accepts a request, before it has any token."""

RESUME_WINDOW_S = 10.0
"""How long a client with a broken stream looks for a gateway that resumes it."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


class Progress:
    """The progress of one request over several calls of `Generate`.

    The client chooses request id, seed and resume token, so that each call asks for the same
    answer, even if no gateway has answered yet. Times are in seconds of `clock`.
    """

    def __init__(
        self,
        request: Request,
        timeout_s: float | None,
        num_gateways: int,
        window_s: float = RESUME_WINDOW_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._message = messages.generate_request(request)
        self._message.request_id = self._message.request_id or f"gen-{secrets.token_hex(12)}"
        self._message.resume_token = secrets.token_urlsafe(32)
        if not self._message.sampling.HasField("seed"):
            self._message.sampling.seed = secrets.randbits(64)
        self._clock = clock
        self._deadline = None if timeout_s is None else clock() + timeout_s
        self._num_gateways = num_gateways
        self._window_s = window_s
        self._received: dict[int, ReceivedSequence] = {}
        self._has_ended = False
        self._was_answered = False
        self._num_breaks = 0
        self._sent_at = self._broke_at = clock()
        self._looked_s = 0.0

    def message(self) -> GenerateRequest:
        """Return the message for the next call, which is sent now, with the received tokens."""
        self._sent_at = self._clock()
        return self._message

    def timeout_s(self) -> float | None:
        """Return the rest of the request's time limit, or None without a limit."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    def record_response(self, response: GenerateResponse) -> None:
        """Record the tokens of a response."""
        self._was_answered, self._num_breaks, self._looked_s = True, 0, 0.0
        self._has_ended = response.HasField("usage")
        for delta in response.deltas:
            received = self._received_of(delta.index)
            received.token_ids.extend(delta.token_ids)
            received.finish_reason = delta.finish_reason

    def _received_of(self, index: int) -> ReceivedSequence:
        if index not in self._received:
            self._received[index] = self._message.received.sequences.add(index=index)
        return self._received[index]

    def record_break(
        self, error: QuireError, metadata: Iterable[tuple[str, str | bytes]] | None = ()
    ) -> float | None:
        """Record a broken call with its initial `metadata`. Returns the seconds until the next
        gateway should be asked, or None if the answer was complete before the call broke.

        Raises `error` if it is final, or if the client gives up: after it has looked for a gateway
        for `window_s`, or at once if the only gateway has never answered. Raises DeadlineExceeded
        if the time limit has passed.
        """
        if not _is_break(error):
            raise error
        if self._has_ended:
            return None
        now = self._clock()
        is_accepted = any(key == ACCEPTED_METADATA for key, _ in metadata or ())
        if self._num_breaks:  # while a gateway worked on the request, the client looked for none
            self._looked_s += (self._sent_at if is_accepted else now) - self._broke_at
        self._broke_at = now
        self._was_answered |= is_accepted or error.code == STOPPING
        self._num_breaks = 1 if is_accepted else self._num_breaks + 1
        asked_all = self._num_breaks >= self._num_gateways
        # With several gateways, one of them may be just returning while another leaves.
        window_s = self._window_s if self._was_answered or self._num_gateways > 1 else 0.0
        if asked_all and self._looked_s >= window_s:
            raise error
        if self._deadline is not None and now >= self._deadline:
            raise DeadlineExceeded("the request's deadline has passed", "deadline_exceeded")
        self._message.received.SetInParent()
        if not asked_all:
            return 0.0
        num_rounds = self._num_breaks // self._num_gateways
        return min(_FIRST_PAUSE_S * 2.0 ** (num_rounds - 1), _LONGEST_PAUSE_S)


def _is_break(error: QuireError) -> bool:
    """Whether the gateway is gone or stopping; any other error is an answer to the request."""
    return isinstance(error, Unreachable) or (
        isinstance(error, Unavailable) and error.code == "draining"
    )
