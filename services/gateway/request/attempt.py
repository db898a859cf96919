"""An attempt: the leases that a request has at workers, under one number.

    QUEUED        -
    RESERVING     decode (not answered yet)
    PULLING       decode
    PREFILLING    decode, prefill
    DECODING      decode; and target, while the request moves to another decode worker

In each status there may be a detached ticket as well. PREFILLING keeps one only if it was swapped
out, and DECODING until the first token, which proves that the decode worker has claimed it.
"""

from collections.abc import Iterator
from typing import Generic, TypeVar

from services.gateway.workers.lease import DecodeReservation, DetachedTicket, Lease, PrefillLease
from services.gateway.workers.worker import Worker
from services.protocol.ticket import Ticket

L = TypeVar("L", bound=Lease)


class _Held(Generic[L]):
    """A lease of an attempt; None once it is released."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, attempt: "Attempt", owner: type) -> L | None:
        lease: L | None = getattr(attempt, self._name, None)
        return None if lease is None or lease.released else lease

    def __set__(self, attempt: "Attempt", lease: L | None) -> None:
        setattr(attempt, self._name, lease)


class Attempt:
    """One attempt of a request, with its leases that are not released.

    The target has a number of its own, under which the request continues there. A detached ticket
    may stem from an earlier attempt, and keeps the number of that attempt.
    """

    detached = _Held[DetachedTicket]()
    """A ticket that no worker has claimed, as far as the gateway knows."""
    target = _Held[DecodeReservation]()
    """The reservation at the decode worker to which the request moves."""
    prefill = _Held[PrefillLease]()
    decode = _Held[DecodeReservation]()

    def __init__(
        self,
        request_id: str,
        number: int,
        detached: DetachedTicket | None = None,
        decode: DecodeReservation | None = None,
    ) -> None:
        self.request_id, self.number = request_id, number
        self.detached, self.decode = detached, decode

    def lease_of(self, worker: Worker, number: int) -> Lease | None:
        """The lease that a worker's message with this attempt number is about; None if there is no
        such lease any more, and the message is dropped."""
        leases = (x for x in self._leases() if x.worker is worker and x.attempt == number)
        return next(leases, None)

    def _leases(self) -> Iterator[Lease]:
        leases = (self.detached, self.target, self.prefill, self.decode)
        return (lease for lease in leases if lease is not None)

    # ── forward ──────────────────────────────────────────────────────────────────────────────────

    def detach(self, lease: Lease, ticket: Ticket) -> None:
        """The worker of `lease` has detached its sequences, as `ticket`."""
        self.mark_claimed(lease.worker)
        lease.finish()
        self.detached = DetachedTicket(lease.worker, ticket)

    def replace_detached(self, pulled: DetachedTicket) -> None:
        """A mover has copied the detached ticket to another pool, and claimed it at its issuer."""
        if detached := self.detached:
            detached.abort()
        self.detached = pulled

    def mark_claimed(self, worker: Worker) -> None:
        """A worker has claimed the detached ticket, or does not need it any more: release it. The
        issuer gets no message if it is that worker."""
        if detached := self.detached:
            if detached.worker is worker:
                detached.finish()
            else:
                detached.abort()

    def shrink_to(self, num_sequences: int) -> None:
        """Free the slots of ended sequences; `num_sequences` keep theirs."""
        for reservation in (self.decode, self.target):
            if reservation is not None:
                reservation.shrink_to(num_sequences)

    # ── to the next attempt ──────────────────────────────────────────────────────────────────────

    def attempt_at_target(self) -> "Attempt | None":
        """The attempt that continues at the target, with the ticket that was detached for it; None:
        the target has not granted the slots."""
        target = self.target
        if target is None or not target.granted:
            return None
        return Attempt(self.request_id, target.attempt, self.detached, target)

    def next_attempt(self, number: int) -> "Attempt":
        """The attempt that follows in the queue. It keeps a detached ticket that no decode worker
        was asked to claim; all other leases are aborted."""
        detached = self.detached
        if detached is not None and not detached.is_sent:
            self.detached = None
        else:
            detached = None
        self.close()
        return Attempt(self.request_id, number, detached)

    def finish_leases_at(self, worker: Worker) -> bool:
        """Finish all leases at a lost worker. True: the prefill lease or the decode reservation was
        one of them."""
        lost = [lease for lease in self._leases() if lease.worker is worker]
        had_work = any(lease in (self.prefill, self.decode) for lease in lost)
        for lease in lost:
            lease.finish()
        return had_work

    def close(self) -> None:
        """Abort all leases."""
        for lease in tuple(self._leases()):
            lease.abort()
