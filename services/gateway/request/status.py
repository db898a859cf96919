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

CANCELLED = "cancelled"
"""The outcome of a request whose client left."""


class RequestStatus(Enum):
    QUEUED = "queued"
    RESERVING = "reserving"
    PULLING = "pulling"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ENDED = "ended"

    def next(self, status: "RequestStatus") -> "RequestStatus":
        """Return `status`. Raises RuntimeError if that status may not follow this one."""
        if status not in _NEXT[self]:
            raise RuntimeError(f"{self.value} cannot become {status.value}")
        return status


_S = RequestStatus
_NEXT = {
    _S.QUEUED: {_S.RESERVING, _S.ENDED},
    _S.RESERVING: {_S.PULLING, _S.PREFILLING, _S.DECODING, _S.QUEUED, _S.ENDED},
    _S.PULLING: {_S.PREFILLING, _S.DECODING, _S.QUEUED, _S.ENDED},
    _S.PREFILLING: {_S.PULLING, _S.DECODING, _S.QUEUED, _S.ENDED},
    _S.DECODING: {_S.QUEUED, _S.ENDED},
    _S.ENDED: set[RequestStatus](),
}
