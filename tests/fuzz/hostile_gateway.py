"""The commands of a hostile gateway to workers, in any order: with its own tickets as workers sent
them (of one sequence, a group, a search), and with tickets of another gateway without their
secrets. A gateway is authenticated, so what it sends has the form of tickets."""

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from quire.v1 import decode_pb2, prefill_pb2, ticket_pb2, worker_pb2
from services.protocol.ticket import MAX_BEAM_WIDTH, BeamParams, TicketSequence
from tests.fuzz.forging import NUMBERS, change
from tests.fuzz.pool_workers import HELLO, Stream
from tests.unit.workers.fakes import GREEDY, SAMPLED, ticket

CORRECT_PROMPT = tuple(range(30_000, 30_014))
REQUESTS = st.sampled_from(["r1", "r2", "r2", "r2", "r4", "r5"])
OWN_TICKETS = {
    "fresh": ticket("r2", range(10), max_tokens=12),
    "group": ticket(
        "r4",
        range(40, 50),
        sampling=replace(SAMPLED, max_tokens=12),
        sequences=tuple(TicketSequence(index) for index in range(3)),
    ),
    "search": ticket(
        "r5", range(60, 70), sampling=replace(GREEDY, max_tokens=12, beam=BeamParams(3, 2))
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
    """A command. `to`: 0 prefill, 1 decode. `base`: the ticket that is sent, if any; "issued ..."
    are its own with blocks, `correct` belongs to another gateway, and all of it is known except its
    secrets. `attempt` is its own, too. `number`: of slots; None: as many as the ticket needs."""

    to: int
    kind: str
    request_id: str = "r2"
    attempt: int = 1
    number: int | None = None
    index: int | None = None
    base: str = "fresh"
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
        pause=st.booleans(),
        digest=st.sampled_from([b"", *(one.digest for one in OWN_TICKETS.values())]),
    ),
    min_size=1,
    max_size=12,
)


def without_secrets(ticket: ticket_pb2.Ticket) -> ticket_pb2.Ticket:
    """All of a ticket except the epochs, which prove its possession, and the root hash."""
    known = ticket_pb2.Ticket()
    known.CopyFrom(ticket)
    change(known, "holder_epoch", 3)
    change(known, "root_hash", b"o" * 16)
    if known.HasField("swapped"):
        known.swapped.holder_epoch = 3
    return known


def send_forged(
    forgery: ForgedCommand, streams: tuple[Stream, Stream], tickets: dict[str, Any]
) -> None:
    stream = streams[forgery.to]
    key: dict[str, Any] = {"request_id": forgery.request_id, "attempt": forgery.attempt}
    match forgery.kind, forgery.to:
        case "ticket", 0:
            sent = _sent(forgery, tickets)
            stream.send(submit=prefill_pb2.PrefillSubmit(ticket=sent))
        case "ticket", _:
            sent = _sent(forgery, tickets)
            own: dict[str, Any] = {"request_id": sent.request_id, "attempt": sent.attempt}
            number = slots_of(sent) if forgery.number is None else forgery.number
            stream.send(reserve=decode_pb2.Reserve(num_sequences=number, **own))
            stream.send(admit=decode_pb2.Admit(ticket=sent))
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


def _sent(forgery: ForgedCommand, tickets: dict[str, Any]) -> ticket_pb2.Ticket:
    sent = ticket_pb2.Ticket()
    sent.CopyFrom(tickets.get(forgery.base, tickets["fresh"]))
    sent.attempt = forgery.attempt
    return sent


def slots_of(forged: ticket_pb2.Ticket) -> int:
    """As many slots as a correct gateway reserves."""
    is_search = forged.sampling.HasField("beam")
    number = forged.sampling.beam.width if is_search else len(forged.sequences)
    return min(number, MAX_BEAM_WIDTH)
