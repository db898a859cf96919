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


class Stage(Enum):
    QUEUED = "queued"
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ENDED = "ended"

    def next(self, stage: "Stage") -> "Stage":
        """`stage`. RuntimeError: no way leads there."""
        if stage not in _NEXT[self]:
            raise RuntimeError(f"{self.value} cannot become {stage.value}")
        return stage


_NEXT = {
    Stage.QUEUED: {Stage.RESERVING, Stage.ENDED},
    Stage.RESERVING: {Stage.PREFILLING, Stage.DECODING, Stage.QUEUED, Stage.ENDED},
    Stage.PREFILLING: {Stage.DECODING, Stage.QUEUED, Stage.ENDED},
    Stage.DECODING: {Stage.QUEUED, Stage.ENDED},
    Stage.ENDED: set[Stage](),
}
