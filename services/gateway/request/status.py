"""The status of a request, and which status may follow which.

             reserve()             submit()              Prefilled
    QUEUED ────────────▶ RESERVING ────────▶ PREFILLING ───────────▶ DECODING ◀┐
      ▲ ▲    refused       │   │ admit(), with a            │        ▲  │   │  │ moved to another
      │ └──────────────────┤   │ detached ticket            │        │  │   └──┘ decode worker
      │                    │   └────────────────────────────┼────────┘  │
      └────────────────────┴────────────────────────────────┴───────────┘
       requeue(): preempted, drained, handed over without a target, ticket gone, worker lost

    PULLING comes before PREFILLING while a mover copies the prompt's cached prefix from another
    pool, and before DECODING while it copies the ticket's KV to the decode worker's pool.

    every status ───▶ ENDED    close(): finished, stop string, error, cancelled, deadline

All sequences of a request share one status. The request ends when its last sequence has ended.
"""

from enum import Enum


class RequestStatus(Enum):
    QUEUED = "queued"
    RESERVING = "reserving"
    PULLING = "pulling"
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
        RequestStatus.PULLING,
        RequestStatus.PREFILLING,
        RequestStatus.DECODING,
        RequestStatus.QUEUED,
        RequestStatus.ENDED,
    },
    RequestStatus.PULLING: {
        RequestStatus.PREFILLING,
        RequestStatus.DECODING,
        RequestStatus.QUEUED,
        RequestStatus.ENDED,
    },
    RequestStatus.PREFILLING: {
        RequestStatus.PULLING,
        RequestStatus.DECODING,
        RequestStatus.QUEUED,
        RequestStatus.ENDED,
    },
    RequestStatus.DECODING: {RequestStatus.QUEUED, RequestStatus.ENDED},
    RequestStatus.ENDED: set[RequestStatus](),
}
