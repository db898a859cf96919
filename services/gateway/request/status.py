"""The status of a request, and which status may follow which.

             reserve()             submit()              Prefilled
    QUEUED ────────────▶ RESERVING ────────▶ PREFILLING ───────────▶ DECODING ◀┐
      ▲ ▲    refused       │   │ admit(), with a            │        ▲  │   │  │ moved to another
      │ └──────────────────┤   │ detached ticket            │        │  │   └──┘ decode worker
      │                    │   └────────────────────────────┼────────┘  │
      └────────────────────┴────────────────────────────────┴───────────┘
       requeue(): preempted, drained, handed over without a target, ticket gone, worker lost

    every status ───▶ ENDED    close(): finished, stop string, error, cancelled, deadline

All sequences of a request share one status. The request ends when its last sequence has ended.
"""

from enum import Enum


class RequestStatus(Enum):
    QUEUED = "queued"
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ENDED = "ended"

    def next(self, status: "RequestStatus") -> "RequestStatus":
        """Returns `status`. RuntimeError: it may not follow this one."""
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
