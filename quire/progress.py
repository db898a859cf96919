"""How a stream outlives its gateway: what the client has got, and when to ask whom to go on.

See ADR 62.
"""

import secrets
import time
from collections.abc import Callable

from quire import messages
from quire.errors import DeadlineExceeded, QuireError, Unavailable, Unreachable
from quire.messages import Request
from quire.v1.inference_pb2 import GenerateRequest, GenerateResponse, ReceivedSequence

RESUME_WINDOW_S = 10.0
"""How long a broken stream looks for a gateway that goes on."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


class Progress:
    """Of one request, over one call after the other. Id, seed and resume token are drawn here, so
    that every gateway is asked for the same thing, also where none has answered yet. Times in
    seconds of `clock`."""

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
        self._heard = False
        self._num_breaks = 0
        self._broke_at = 0.0

    def message(self) -> GenerateRequest:
        """What to send now."""
        return self._message

    def timeout_s(self) -> float | None:
        """What is left of the request's time."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    def saw(self, response: GenerateResponse) -> None:
        self._heard, self._num_breaks = True, 0
        self._has_ended = response.HasField("usage")
        for delta in response.deltas:
            received = self._received_of(delta.index)
            received.token_ids.extend(delta.token_ids)
            received.finish_reason = delta.finish_reason

    def _received_of(self, index: int) -> ReceivedSequence:
        if index not in self._received:
            self._received[index] = self._message.received.sequences.add(index=index)
        return self._received[index]

    def broke(self, error: QuireError) -> float | None:
        """After how long to ask the next gateway; None: all had come before it broke. Raises
        `error` if it is an answer, or if it is time to give up: a single gateway of which nothing
        was heard is asked once."""
        if not _is_break(error):
            raise error
        if self._has_ended:
            return None
        now = self._clock()
        self._num_breaks += 1
        if self._num_breaks == 1:
            self._broke_at = now
        asked_all = self._num_breaks >= self._num_gateways
        # Of several, one that has just come back is found only after a while.
        window_s = self._window_s if self._heard or self._num_gateways > 1 else 0.0
        if asked_all and now - self._broke_at >= window_s:
            raise error
        if self._deadline is not None and now >= self._deadline:
            raise DeadlineExceeded("the request's deadline has passed", "deadline_exceeded")
        self._message.received.SetInParent()
        if not asked_all:
            return 0.0
        num_rounds = self._num_breaks // self._num_gateways
        return min(_FIRST_PAUSE_S * 2.0 ** (num_rounds - 1), _LONGEST_PAUSE_S)


def _is_break(error: QuireError) -> bool:
    """Whether the gateway is gone or going, rather than saying what is wrong."""
    return isinstance(error, Unreachable) or (
        isinstance(error, Unavailable) and error.code == "draining"
    )
