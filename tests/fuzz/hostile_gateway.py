"""The commands of a hostile gateway to workers: each one forged from its own tickets (of one
sequence, a group, a search) and from those of another gateway."""

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from quire.types import Beam
from quire.v1 import decode_pb2, prefill_pb2, ticket_pb2, worker_pb2
from services.protocol.ticket import MAX_BEAM_WIDTH, TicketSequence
from tests.fuzz.forging import NUMBERS, REQUESTS, Changes, changes, forge
from tests.fuzz.pool_workers import HELLO, Stream
from tests.unit.workers.fakes import GREEDY, SAMPLED, ticket

CORRECT_PROMPT = tuple(range(30_000, 30_014))
OWN_TICKETS = {
    "fresh": ticket("r2", range(10), max_tokens=12),
    "group": ticket(
        "r4",
        range(40, 50),
        sampling=replace(SAMPLED, max_tokens=12),
        sequences=tuple(TicketSequence(index) for index in range(3)),
    ),
    "search": ticket(
        "r5", range(60, 70), sampling=replace(GREEDY, max_tokens=12, n=2, beam=Beam(3))
    ),
}
"""Its first requests, sent as by a correct gateway."""
SWAPPED_TICKET = ticket(
    "r3",
    range(20, 30),
    sampling=replace(SAMPLED, max_tokens=12),
    sequences=tuple(TicketSequence(index) for index in range(2)),
)
"""It has a ticket of this kind that was swapped out."""


@dataclass(frozen=True)
class ForgedCommand:
    """A command. `to`: 0 prefill, 1 decode. `base`: the ticket that is forged, if any; "issued ..."
    are its own with blocks, `correct` belongs to another gateway, and all of it is known except its
    secrets. `number`: of slots; None: as many as the ticket needs."""

    to: int
    kind: str
    request_id: str = "r2"
    attempt: int = 1
    number: int | None = None
    index: int | None = None
    base: str = "fresh"
    changes: Changes = ()
    pause: bool = False
    digest: bytes = b""


FORGED_COMMANDS = st.lists(
    st.builds(
        ForgedCommand,
        to=st.integers(0, 1),
        kind=st.sampled_from(
            ["ticket"] * 6
            + ["reserve", "resume", "hand_over", "abort"] * 2
            + ["hello", "nothing", "wrong"]
        ),
        request_id=REQUESTS,
        attempt=st.sampled_from([1, 1, 1, 1, 7, 2]),
        number=st.none() | st.sampled_from([0, 1, 2, 9, 2**31, 2**32 - 1]),
        index=st.none() | NUMBERS,
        base=st.sampled_from(
            [
                *OWN_TICKETS,
                *(f"issued {name}" for name in OWN_TICKETS),
                "swapped",
                "correct",
                "correct",
            ]
        ),
        changes=st.lists(changes(CORRECT_PROMPT), max_size=2).map(tuple),
        pause=st.booleans(),
        digest=st.sampled_from([b"", *(one.digest for one in OWN_TICKETS.values())]),
    ),
    min_size=1,
    max_size=12,
)


def without_secrets(ticket: ticket_pb2.Ticket) -> ticket_pb2.Ticket:
    """All of a ticket except the epochs, which prove its possession, and the root hash."""
    known = forge(ticket, [("holder_epoch", 3), ("root_hash", b"o" * 16)])
    if known.HasField("swapped"):
        known.swapped.holder_epoch = 3
    return known


_SECRETS = ("holder_epoch", "root_hash", "swapped.holder_epoch")


def _forged(forgery: ForgedCommand, tickets: dict[str, Any]) -> ticket_pb2.Ticket:
    belongs_to_other = forgery.base == "correct"
    changes = [c for c in forgery.changes if not (belongs_to_other and c[0] in _SECRETS)]
    return forge(tickets.get(forgery.base, tickets["fresh"]), changes)


def send_forged(
    forgery: ForgedCommand, streams: tuple[Stream, Stream], tickets: dict[str, Any]
) -> None:
    stream = streams[forgery.to]
    key: dict[str, Any] = {"request_id": forgery.request_id, "attempt": forgery.attempt}
    match forgery.kind, forgery.to:
        case "ticket", 0:
            forged = _forged(forgery, tickets)
            stream.send(submit=prefill_pb2.PrefillSubmit(ticket=forged))
        case "ticket", _:
            forged = _forged(forgery, tickets)
            own: dict[str, Any] = {"request_id": forged.request_id, "attempt": forged.attempt}
            number = slots_of(forged) if forgery.number is None else forgery.number
            stream.send(reserve=decode_pb2.Reserve(num_sequences=number, **own))
            stream.send(admit=decode_pb2.Admit(ticket=forged))
        case "reserve", 1:
            stream.send(reserve=decode_pb2.Reserve(num_sequences=forgery.number, **key))
        case "hand_over", 1:
            stream.send(hand_over=decode_pb2.HandOver(**key))
        case "resume", 1:
            stream.send(resume=decode_pb2.Resume(digest=forgery.digest, **key))
        case "hello", _:
            stream.send(hello=HELLO)
        case "wrong", _:
            stream.send(hello=worker_pb2.Hello(peer_id="x" * 100_000, protocol_version=99))
        case "nothing", _:
            stream.send()
        case _:
            stream.send(abort=worker_pb2.Abort(index=forgery.index, **key))


def slots_of(forged: ticket_pb2.Ticket) -> int:
    """As many slots as a correct gateway reserves."""
    is_search = forged.sampling.HasField("beam")
    number = forged.sampling.beam.width if is_search else len(forged.sequences)
    return min(number, MAX_BEAM_WIDTH)
