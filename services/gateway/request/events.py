"""The events of a request: what was decided about it, and the figures that the decision had.

They are noted where the decision is taken. The figures of an answer (`record.py`), the story of
`quire explain` (`story.py`) and the dashboard's rows are views of them.
"""

from dataclasses import dataclass
from enum import Enum

MAX_LISTED = 4
"""The most workers or requests that one event lists."""

Holders = tuple[tuple[str, int], ...]
"""Requests that held blocks: the client's id, and about how many blocks."""
Slots = tuple[tuple[str, int, int], ...]
"""Decode workers: the id, the free slots, and all slots."""


class Phase(Enum):
    WAITING = "waiting"
    """In the queue, for slots, or at a prefill worker that has not begun: for its turn or for
    blocks."""
    PREFILL = "prefill"
    HAND_OFF = "hand-off"
    """A decode worker has been sent the ticket and has not answered with a token."""
    DECODE = "decode"
    MOVING = "moving"
    """As HAND_OFF, for a request that moves between decode workers."""
    PREEMPTED = "preempted"
    """In the queue again, because others needed its blocks."""
    LOST = "lost"
    """In the queue again, because a worker was lost or sent something impossible."""


@dataclass(frozen=True, slots=True)
class Entered:
    """A phase began."""

    phase: Phase
    worker_id: str = ""
    """The worker of the phase; empty if there is none."""


@dataclass(frozen=True, slots=True)
class SlotsAwaited:
    """The request was the first of its queue, and no decode worker had the slots for it."""

    num_sequences: int
    workers: Slots


@dataclass(frozen=True, slots=True)
class WorkersAwaited:
    """No worker could take the request."""

    reason: str


@dataclass(frozen=True, slots=True)
class PrefillOption:
    """A prefill worker that could have computed the prompt, and what that would have cost."""

    worker_id: str
    num_pending: int
    """The tokens that the worker had to compute before."""
    num_to_compute: int
    """The request's own tokens that neither the cache nor a request in progress there had."""
    duration_s: float
    """The time for both, by the measured speed of the pool."""


@dataclass(frozen=True, slots=True)
class Placed:
    """The request was sent to a prefill worker, with its decode slots reserved."""

    pool_id: str
    """The pool of the prefill."""
    fingerprint: str
    block_size: int
    prefill: tuple[PrefillOption, ...]
    """The chosen worker first."""
    decode_id: str
    """The decode worker; empty if the request needs none."""
    decode: Slots
    source_pool_id: str = ""
    """The pool from which a cached prefix is copied; empty if none is."""

    @property
    def home(self) -> tuple[str, str]:
        return self.fingerprint, self.pool_id


@dataclass(frozen=True, slots=True)
class BlocksAwaited:
    """The pool had too few blocks for the request, which waited for them at its prefill worker."""

    worker_id: str
    num_needed: int
    """The new blocks that it needs; 0 if an earlier request already waited for blocks."""
    num_available: int
    holders: Holders


@dataclass(frozen=True, slots=True)
class Computed:
    """The prompt has been computed."""

    num_tokens: int
    """The tokens of the prompt, and those generated before."""
    num_cached: int | None
    """How many of them the prefix cache had; None if all were computed for their own results."""


@dataclass(frozen=True, slots=True)
class Preempted:
    """The pool had no block left for an earlier request to grow; this one was the last in order."""

    worker_id: str
    is_swapped: bool
    """Whether its KV was kept in the swap pool; otherwise it is computed again."""
    holders: Holders


@dataclass(frozen=True, slots=True)
class Moved:
    """The request went on at another decode worker, without being computed again."""

    source: str
    """The worker that it left, or the pool if its KV was copied."""
    target: str
    cause: str
    """The rest of a sentence that begins with the move: "because ..."."""


@dataclass(frozen=True, slots=True)
class SetBack:
    """An attempt failed, and the request went back to its queue."""

    reason: str


Event = (
    Entered
    | SlotsAwaited
    | WorkersAwaited
    | Placed
    | BlocksAwaited
    | Computed
    | Preempted
    | Moved
    | SetBack
)
