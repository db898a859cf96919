"""Crash attribution: decides whether a request may have crashed its workers.

A worker reports which requests it begins. When it dies, each request that it had begun becomes a
suspect for workers of its role, until one of them has given the request a token. A worker begins
suspects one at a time (`services.worker.requests.suspect_queue`), so a second crash convicts only
one request. A request that makes progress never fails, however often workers die.

    free ──its worker dies, having begun it──▶ suspected ──the same again──▶ convicted
      ▲                                            │
      └────────────────── a token ─────────────────┘

A worker that closed its stream, is silent or drains is lost, but did not crash. A crash makes no
suspect of a request that the worker had not begun, and none of a beam search that only repeated
steps which another worker had survived. In every case, a request fails after `MAX_LOSSES` workers
of a role were lost without a token.

See ADR 57.
"""

from collections import Counter

from blockstore.registry import Role
from services.common.errors import PoisonRequest, QuireError, Unavailable
from services.gateway.workers.worker import Worker

MAX_LOSSES = 3
"""How many workers of a role a request may lose in a row, without a token from any of them."""


class CrashAttribution:
    """The crash attribution of one request, over all its attempts."""

    def __init__(self) -> None:
        self._suspected: set[Role] = set()
        self._num_losses: Counter[Role] = Counter()
        self._worker: Worker | None = None
        self.has_begun = False

    def assign(self, worker: Worker) -> bool:
        """Note that the request goes to `worker`. True: it goes there as a suspect."""
        self._worker, self.has_begun = worker, False
        return worker.member.role in self._suspected

    def unassign(self) -> None:
        """Note that the request is at no worker."""
        self._worker, self.has_begun = None, False

    def note_begun(self, worker: Worker) -> None:
        self.has_begun = self.has_begun or worker is self._worker

    def note_token(self, worker: Worker) -> None:
        self._suspected.discard(worker.member.role)
        del self._num_losses[worker.member.role]

    def note_lost(self, worker: Worker, *, died: bool) -> QuireError | None:
        """Note that a worker was lost. Returns an error if the request fails with it."""
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
