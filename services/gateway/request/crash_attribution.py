"""Who computes a request just now, and whether workers died over it before.

A worker that dies says not why, but it has said what it began to compute. Every request that it had
begun is a suspect, for workers of that role, until it has got a token from one of them again;
suspects are begun by a worker one at a time (`services.worker.suspect_queue`), so that a second
death is
over one alone. Who only waited there is no suspect. A request that makes progress is never given
up, however often workers die.

    free ──its worker dies, having begun it──▶ suspected ──the same again──▶ convicted
      ▲                                            │
      └────────────────── a token ─────────────────┘

A worker that is lost alive is no death: it closed its stream, says nothing, or leaves anyway. Nor
is it one over a request that it had not begun, or over a search that only did again what another
worker had done and outlived: it begins again from its last ticket. As often as that may be, a
request that never gets a token from workers of a role is given up after some of them, poison or
not.

See ADR 57.
"""

from collections import Counter

from blockstore.registry import Role
from services.common.errors import PoisonRequest, QuireError, Unavailable
from services.gateway.workers.worker import Worker

MAX_LOSSES = 3
"""How many workers of a role may be lost in a row with a request that gets no token from any."""


class CrashAttribution:
    """Of one request, over all its attempts."""

    def __init__(self) -> None:
        self._suspected: set[Role] = set()
        self._num_losses: Counter[Role] = Counter()
        self._worker: Worker | None = None
        self.has_begun = False

    def assign(self, worker: Worker) -> bool:
        """It is sent there next; whether as a suspect."""
        self._worker, self.has_begun = worker, False
        return worker.member.role in self._suspected

    def unassign(self) -> None:
        """It is nowhere."""
        self._worker, self.has_begun = None, False

    def note_begun(self, worker: Worker) -> None:
        self.has_begun = self.has_begun or worker is self._worker

    def note_token(self, worker: Worker) -> None:
        self._suspected.discard(worker.member.role)
        del self._num_losses[worker.member.role]

    def note_lost(self, worker: Worker, *, died: bool) -> QuireError | None:
        """Take note that its worker was lost; the error that it ends with, if it does."""
        if worker is not self._worker:
            return None
        role, had_begun = worker.member.role, self.has_begun
        self.unassign()
        if died and had_begun:
            if role in self._suspected:
                why = f"this request cannot be computed: its {role} worker died twice"
                return PoisonRequest(why)
            self._suspected.add(role)
        self._num_losses[role] += 1
        if self._num_losses[role] > MAX_LOSSES:
            return Unavailable(f"given up after {self._num_losses[role]} {role} workers were lost")
        return None
