"""Slots for the sequences of one request at a decode worker: asked for, granted or refused, and let
go of."""

import asyncio
from collections.abc import Hashable

from services.common.runtime.logging import get_logger
from services.gateway.intake.identity import client_id
from services.gateway.workers.messages import HandOver, Reserve
from services.gateway.workers.worker import Worker

log = get_logger(__name__)

Told = tuple[Worker, int]
"""Who has let go of which attempt already, and is not told to."""


class DecodeReservation:
    """All or none of `num_sequences`. `guest` counts at the worker from the asking on, one
    `DecodeReservation` at a time for a guest and a worker."""

    def __init__(
        self, worker: Worker, guest: Hashable, request_id: str, attempt: int, num_sequences: int
    ) -> None:
        self.worker = worker
        self.attempt = attempt
        self._guest = guest
        self._num_sequences = num_sequences
        self._request_id = request_id
        self._is_asked_back = False
        self._answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        worker.join(guest, num_sequences)
        worker.send(Reserve(request_id, attempt, num_sequences))

    @property
    def key(self) -> Told:
        return self.worker, self.attempt

    @property
    def granted(self) -> bool:
        return self._answer.done() and self._answer.result()

    @property
    def refused(self) -> bool:
        return self._answer.done() and not self._answer.result()

    def answer(self, granted: bool) -> None:
        """What the worker says. Only the first word counts."""
        if not self._answer.done():
            self._answer.set_result(granted)

    async def answered(self, timeout_s: float) -> None:
        """Return with the answer, when it is let go of, or after the timeout: then the worker is
        not asked again until it has answered."""
        await asyncio.wait([self._answer], timeout=timeout_s)
        if not self._answer.done():  # it may still be granted, after we have turned away
            log.warning(
                "reservation_unanswered",
                request_id=client_id(self._request_id),
                worker_id=self.worker.id,
            )
            self.worker.unresponsive = True

    def keep(self, num_sequences: int) -> None:
        """The other sequences have ended."""
        self.worker.join(self._guest, num_sequences)

    def ask_back(self) -> None:
        """Ask the worker to hand over what runs there. Again: no error."""
        if not self._is_asked_back:
            self._is_asked_back = True
            self.worker.send(HandOver(self._request_id, self.attempt))

    def let_go(self, told: Told | None = None) -> None:
        refused = self.refused
        if not refused and self.key != told:
            self.worker.abort(self._request_id, self.attempt)
        self.worker.leave(self._guest)
        if refused:
            self.worker.refuse(self._num_sequences)
        self.answer(False)
