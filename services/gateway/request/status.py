"""Where a request is on its walk through the workers.

          reserve()            start()                Prefilled                move()
    QUEUED ───────▶ RESERVING ─────────▶ PREFILLING ────────────▶ DECODING ◀──────────┐
      ▲ ▲   refused  │ │                     │                     ▲  │ │ handed over │
      │ └────────────┘ │ go_on()             │                     │  │ └─────────────┘
      │                └─────────────────────┼─────────────────────┘  │
      └──────────────────────────────────────┴────────────────────────┘
        given back (preempted, draining, stale ticket), or the worker was lost

    any ───▶ ENDED    finish reason, stop string, error, cancelled, deadline

A request walks as one, however many sequences it has: it ends when the last of them has.
"""

from enum import Enum


class RequestStatus(Enum):
    QUEUED = "queued"
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ENDED = "ended"

    def next(self, status: "RequestStatus") -> "RequestStatus":
        """`status`. RuntimeError: no way leads there."""
        if status not in _NEXT[self]:
            raise RuntimeError(f"{self.value} cannot become {status.value}")
        return status


_NEXT = {
    RequestStatus.QUEUED: {RequestStatus.RESERVING, RequestStatus.ENDED},
    RequestStatus.RESERVING: {
        RequestStatus.PREFILLING,
        RequestStatus.DECODING,
        RequestStatus.QUEUED,
        RequestStatus.ENDED,
    },
    RequestStatus.PREFILLING: {RequestStatus.DECODING, RequestStatus.QUEUED, RequestStatus.ENDED},
    RequestStatus.DECODING: {RequestStatus.QUEUED, RequestStatus.ENDED},
    RequestStatus.ENDED: set[RequestStatus](),
}
