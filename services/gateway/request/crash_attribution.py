"""Crash attribution: decides whether a request may have crashed its workers.

A worker reports which requests it begins. A request that two workers of a role in a row had begun
when they died, without a token from one in between, fails. A request that makes progress never
fails, however often workers die.

A worker that closed its stream, is silent or drains is lost, but did not crash. A crash counts for
no request that the worker had not begun, and for no beam search that only repeated steps which
another worker had survived. In every case, a request fails after `MAX_LOSSES` workers of a role
were lost without a token.
"""

from collections import Counter

from blockstore.registry import Role
from services.gateway.workers.worker import Worker
from services.runtime.errors import PoisonRequest, QuireError, Unavailable

MAX_LOSSES = 3
"""How many workers of a role a request may lose in a row, without a token from any of them."""


class CrashAttribution:
    """The crash attribution of one request, over all its attempts."""

    def __init__(self) -> None:
        self._crashed: set[Role] = set()
        """The roles in which a worker died that had begun the request, with no token since."""
        self._num_losses: Counter[Role] = Counter()
        self._worker: Worker | None = None
        self._has_begun = False

    def assign(self, worker: Worker | None) -> None:
        """Note that the request goes to `worker`, or is at no worker any more."""
        self._worker, self._has_begun = worker, False

    def note_begun(self, worker: Worker) -> None:
        self._has_begun = self._has_begun or worker is self._worker

    def note_token(self, worker: Worker) -> None:
        self._crashed.discard(worker.member.role)
        del self._num_losses[worker.member.role]

    def note_lost(self, worker: Worker, *, died: bool) -> QuireError | None:
        """Note that a worker was lost. Returns an error if the request fails with it."""
        if worker is not self._worker:
            return None
        role, had_begun = worker.member.role, self._has_begun
        self.assign(None)
        if died and had_begun:
            if role in self._crashed:
                why = f"this request cannot be computed: its {role} worker died twice"
                return PoisonRequest(why)
            self._crashed.add(role)
        self._num_losses[role] += 1
        if self._num_losses[role] > MAX_LOSSES:
            return Unavailable(f"given up after {self._num_losses[role]} {role} workers were lost")
        return None
