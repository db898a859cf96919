"""The commands of a hostile gateway to workers: each one forged from its own tickets (of one
sequence, a group, a search) and from those of another gateway."""

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from quire.v1 import decode_pb2, prefill_pb2, ticket_pb2, worker_pb2
from services.protocol.ticket import MAX_BEAM_WIDTH, BeamParams, TicketSequence
from tests.fuzz.forging import NUMBERS, REQUESTS, Changes, changes, forge
from tests.fuzz.pool_workers import HELLO, Stream
from tests.unit.workers.fakes import GREEDY, SAMPLED, ticket

HONEST_PROMPT = tuple(range(30_000, 30_014))
MINE = {
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
"""Its first requests, sent as by an honest gateway."""
SWAPPED = ticket(
    "r3",
    range(20, 30),
    sampling=replace(SAMPLED, max_tokens=12),
    sequences=tuple(TicketSequence(index) for index in range(2)),
)
"""It has a ticket of this kind that was swapped out."""


@dataclass(frozen=True)
class Say:
    """A command. `to`: 0 prefill, 1 decode. `base`: the ticket that is forged, if any; "issued ..."
    are its own with blocks, `honest` belongs to another gateway, and all of it is known except its
    secrets. `number`: of slots; None: as many as the ticket needs."""

    to: int
    command: str
    request_id: str = "r2"
    attempt: int = 1
    number: int | None = None
    index: int | None = None
    base: str = "fresh"
    changes: Changes = ()
    pause: bool = False


SAYINGS = st.lists(
    st.builds(
        Say,
        to=st.integers(0, 1),
        command=st.sampled_from(
            ["ticket"] * 6
            + ["reserve", "resume", "hand_over", "abort"] * 2
            + ["hello", "nothing", "wrong"]
        ),
        request_id=REQUESTS,
        attempt=st.sampled_from([1, 1, 1, 1, 7, 2]),
        number=st.none() | st.sampled_from([0, 1, 2, 9, 2**31, 2**32 - 1]),
        index=st.none() | NUMBERS,
        base=st.sampled_from(
            [*MINE, *(f"issued {name}" for name in MINE), "swapped", "honest", "honest"]
        ),
        changes=st.lists(changes(HONEST_PROMPT), max_size=2).map(tuple),
        pause=st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


def without_secrets(honest: ticket_pb2.Ticket) -> ticket_pb2.Ticket:
    """All of a ticket except the epochs, which prove its possession, and the root hash."""
    known = forge(honest, [("holder_epoch", 3), ("root_hash", b"o" * 16)])
    if known.HasField("swapped"):
        known.swapped.holder_epoch = 3
    return known


_SECRETS = ("holder_epoch", "root_hash", "swapped.holder_epoch")


def _forged(saying: Say, tickets: dict[str, Any]) -> ticket_pb2.Ticket:
    of_somebody_else = saying.base == "honest"
    changes = [c for c in saying.changes if not (of_somebody_else and c[0] in _SECRETS)]
    return forge(tickets.get(saying.base, tickets["fresh"]), changes)


def utter(saying: Say, streams: tuple[Stream, Stream], tickets: dict[str, Any]) -> None:
    stream = streams[saying.to]
    key: dict[str, Any] = {"request_id": saying.request_id, "attempt": saying.attempt}
    match saying.command, saying.to:
        case "ticket", 0:
            forged = _forged(saying, tickets)
            stream.say(submit=prefill_pb2.PrefillSubmit(ticket=forged))
        case "ticket", _:
            forged = _forged(saying, tickets)
            own: dict[str, Any] = {"request_id": forged.request_id, "attempt": forged.attempt}
            number = slots_of(forged) if saying.number is None else saying.number
            stream.say(reserve=decode_pb2.Reserve(num_sequences=number, **own))
            stream.say(admit=decode_pb2.Admit(ticket=forged))
        case "reserve", 1:
            stream.say(reserve=decode_pb2.Reserve(num_sequences=saying.number, **key))
        case "hand_over", 1:
            stream.say(hand_over=decode_pb2.HandOver(**key))
        case "resume", 1:
            stream.say(resume=decode_pb2.Resume(ticket=_forged(saying, tickets)))
        case "hello", _:
            stream.say(hello=HELLO)
        case "wrong", _:
            stream.say(hello=worker_pb2.Hello(peer_id="x" * 100_000, protocol_version=99))
        case "nothing", _:
            stream.say()
        case _:
            stream.say(abort=worker_pb2.Abort(index=saying.index, **key))


def slots_of(forged: ticket_pb2.Ticket) -> int:
    """As many slots as an honest gateway reserves."""
    is_search = forged.sampling.HasField("beam")
    number = forged.sampling.beam.width if is_search else len(forged.sequences)
    return min(number, MAX_BEAM_WIDTH)
