"""Everything that a request has at workers. Each is told once to let go: `told` knows already.

    QUEUED nobody · RESERVING decode (a slot) · PREFILLING prefill (the blocks), decode (a slot)
    DECODING decode (the blocks); while it moves, the next decode worker (a slot)

and at any stage but PREFILLING the issuer of a ticket at rest (the blocks), until the first token
of the decode worker that it was sent to, which has claimed it then: the issuer is told, and forgets
it. PREFILLING keeps one only if it was swapped out.
"""

from dataclasses import dataclass

from services.gateway.request.crash_attribution import CrashAttribution
from services.gateway.scheduling.decode_reservation import DecodeReservation, Told
from services.gateway.workers.worker import Worker
from services.protocol.ticket import Swapped, Ticket


@dataclass(frozen=True, slots=True)
class Entrusted:
    """A ticket, and the worker that keeps what belongs to it: a prefill worker that computes it, or
    whoever issued it, at rest in its pool or swapped out, until somebody has claimed it."""

    ticket: Ticket
    worker: Worker

    @property
    def key(self) -> Told:
        return self.worker, self.ticket.attempt

    def let_go(self, told: Told | None = None) -> None:
        if self.key != told:
            self.worker.abort(*self.ticket.key)
        self.worker.prefill_loads.pop(self.ticket.request_id, None)


class Leases:
    """`next`: the slot of a decode worker to which the request moves."""

    def __init__(self) -> None:
        self.computing: Entrusted | None = None
        self.at_rest: Entrusted | None = None
        self.slot: DecodeReservation | None = None
        self.next: DecodeReservation | None = None
        self.crash_attribution = CrashAttribution()

    @property
    def prefill(self) -> Worker | None:
        return None if self.computing is None else self.computing.worker

    @property
    def decode(self) -> Worker | None:
        return None if self.slot is None else self.slot.worker

    @property
    def swapped(self) -> Swapped | None:
        return None if self.at_rest is None else self.at_rest.ticket.swapped

    def speakers(self, attempt: int) -> tuple[Worker | None, ...]:
        """Who may speak for this attempt, the one of now."""
        at_rest = self.at_rest
        issued_it = at_rest is not None and at_rest.ticket.attempt == attempt
        return self.prefill, self.decode, at_rest.worker if at_rest and issued_it else None

    # ── what changes hands ───────────────────────────────────────────────────────────────────────

    def issue(self, ticket: Ticket) -> None:
        """The prefill worker has put at rest what it computed. A ticket that was swapped out is of
        no use any more."""
        assert self.computing is not None
        self.let_go_of_ticket()
        self.computing.let_go(told=self.computing.key)
        self.at_rest, self.computing = Entrusted(ticket, self.computing.worker), None

    def hand_over(self, ticket: Ticket) -> DecodeReservation | None:
        """The decode worker has put at rest what ran there, and the slot is free. The one where it
        goes on; None: it has none."""
        assert self.slot is not None
        self.at_rest = Entrusted(ticket, self.slot.worker)
        self.slot.let_go(told=self.slot.key)
        self.slot = None
        if self.next is not None and self.next.granted:
            self.slot, self.next = self.next, None
        return self.slot

    def ticket_claimed_by(self, decode: Worker) -> None:
        """The issuer is told, and forgets it; it knows by itself if it is the same worker."""
        if self.at_rest is not None:
            self.let_go_of_ticket(self.at_rest.key if decode is self.at_rest.worker else None)

    def lose(self, worker: Worker) -> bool:
        """The worker has let go of everything. Whether the request itself was there."""
        if self.at_rest is not None and worker is self.at_rest.worker:
            self.at_rest = None  # it may be claimed already; if not, the decode worker says so
        if self.next is not None and worker is self.next.worker:
            self.let_go_of_next()
        return worker in (self.decode, self.prefill)

    def keep(self, num_sequences: int) -> None:
        """So many go on."""
        for slot in (self.slot, self.next):
            if slot is not None:
                slot.keep(num_sequences)

    # ── letting go ───────────────────────────────────────────────────────────────────────────────

    def let_go(self, told: Told | None = None) -> None:
        self.let_go_of_ticket(told)
        self.let_go_of_work(told)

    def let_go_of_ticket(self, told: Told | None = None) -> None:
        if self.at_rest is not None:
            self.at_rest.let_go(told)
            self.at_rest = None

    def let_go_of_work(self, told: Told | None = None) -> None:
        """All but a ticket at rest."""
        self.crash_attribution.take_back()
        self.let_go_of_next(told)
        if self.computing is not None:
            self.computing.let_go(told)
        if self.slot is not None:
            self.slot.let_go(told)
        self.computing = self.slot = None

    def let_go_of_next(self, told: Told | None = None) -> None:
        """It does not move any more."""
        slot, self.next = self.next, None
        if slot is not None:
            slot.let_go(told)
