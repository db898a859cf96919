"""What a hostile gateway says to the workers: every command, with every field wrong, forged after
tickets of its own and of somebody else."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from quire.v1 import decode_pb2, prefill_pb2, ticket_pb2, worker_pb2
from tests.fuzz.pool_workers import HELLO, Stream
from tests.unit.workers.fakes import ticket

HONEST = ticket("r1", range(30_000, 30_014), max_tokens=24, attempt=7)
MINE = ticket("r2", range(10), max_tokens=12)

NUMBERS = st.sampled_from([0, 1, 2, 3, 7, 10, 13, 14, 15, 31, 32, 63, 64, 65, 2**31, 2**32 - 1])
LARGE = NUMBERS | st.sampled_from([2**52 - 1, 2**52, 2**53, 2**63, 2**64 - 1])
REQUESTS = st.sampled_from(["r1", "r2", "r2", "r2", "", "x" * 300])
FLOATS = st.sampled_from([0.0, -1.0, 0.5, 1.0, 1e30, float("nan"), float("inf")])
BLOCKS = st.lists(st.integers(0, 33), max_size=6)


def _set(path: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[str, Any]]:
    return st.tuples(st.just(path), values)


CHANGES = st.one_of(
    _set("request_id", REQUESTS),
    _set("attempt", NUMBERS),
    _set("order", LARGE),
    _set("pool_id", st.sampled_from(["pool", "", "other", "{}", "x" * 300])),
    _set("holder_id", st.sampled_from(["h-r1", "h-r2", "h-r2", "h-new", "h-r2+", "", "x" * 300])),
    _set("holder_epoch", LARGE),
    _set("root_hash", st.sampled_from([bytes(16), b"x" * 16, b"", bytes(15)])),
    _set("timeout_ms", LARGE),
    _set("num_cached_tokens", NUMBERS),
    _set("prompt_token_ids", st.lists(NUMBERS, max_size=70)),
    _set("prompt_token_ids", st.just(HONEST.prompt_token_ids)),
    _set("sequences.index", NUMBERS),
    _set("sequences.token_ids", st.lists(NUMBERS, max_size=16)),
    _set("sequences.block_ids", BLOCKS),
    _set("sequences.num_computed_tokens", NUMBERS),
    _set("sampling.temperature", FLOATS),
    _set("sampling.top_p", FLOATS),
    _set("sampling.min_p", FLOATS),
    _set("sampling.top_k", NUMBERS),
    _set("sampling.seed", LARGE),
    _set("sampling.max_tokens", NUMBERS),
    _set("sampling.stop_token_ids", st.lists(NUMBERS, max_size=5)),
    _set("sampling.repetition_penalty", FLOATS),
    _set("sampling.presence_penalty", FLOATS),
    _set("sampling.frequency_penalty", FLOATS),
    _set("sampling.allowed_token_ids", st.lists(NUMBERS, max_size=5)),
    _set("sampling.min_tokens", NUMBERS),
    _set("sequences", st.sampled_from(["none", "twice"])),
    _set("swapped.pool_id", st.sampled_from(["colder", "pool", "", "{}", "x" * 300])),
    _set("swapped.holder_id", st.sampled_from(["h-r1", "h-r2", "h-r3", "h-new", "", "x" * 300])),
    _set("swapped.holder_epoch", LARGE),
    _set("swapped.tables.index", NUMBERS),
    _set("swapped.tables.block_ids", BLOCKS),
)


@dataclass(frozen=True)
class Say:
    """`to`: 0 prefill, 1 decode. `base`: the ticket that is forged, if there is one; `honest` is
    somebody else's, of which all is known but what makes one its bearer."""

    to: int
    command: str
    request_id: str = "r2"
    attempt: int = 1
    number: int = 1
    base: str = "fresh"
    changes: tuple[tuple[str, Any], ...] = ()
    pause: bool = False


SAYINGS = st.lists(
    st.builds(
        Say,
        to=st.integers(0, 1),
        command=st.sampled_from(
            ["ticket"] * 6
            + ["reserve", "resume", "hand_over"] * 2
            + ["abort", "hello", "nothing", "wrong"]
        ),
        request_id=REQUESTS,
        attempt=st.sampled_from([1, 1, 1, 1, 7, 2]),
        number=st.sampled_from([1, 1, 1, 1, 0, 2, 9, 2**32 - 1]),
        base=st.sampled_from(["fresh", "issued", "issued", "swapped", "swapped", "honest"]),
        changes=st.lists(CHANGES, max_size=2).map(tuple),
        pause=st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


def forge(base: ticket_pb2.Ticket, changes: Sequence[tuple[str, Any]]) -> ticket_pb2.Ticket:
    forged = ticket_pb2.Ticket()
    forged.CopyFrom(base)
    for path, value in changes:
        where, _, name = path.rpartition(".")
        if path == "sequences":
            copies = list(forged.sequences) * 2 if value == "twice" else []
            del forged.sequences[:]
            forged.sequences.extend(copies)
            continue
        for target in _targets(forged, where):
            _assign(target, name, value)
    return forged


def _targets(forged: ticket_pb2.Ticket, where: str) -> Sequence[Any]:
    match where:
        case "sampling":
            return [forged.sampling]
        case "sequences":
            return forged.sequences
        case "swapped":
            return [forged.swapped]
        case "swapped.tables":
            return forged.swapped.tables
    return [forged]


def without_secrets(honest: ticket_pb2.Ticket) -> ticket_pb2.Ticket:
    """All of a ticket but the epochs, one of which is that of who has it, and the root hash."""
    known = forge(honest, [("holder_epoch", 3), ("root_hash", b"o" * 16)])
    if known.HasField("swapped"):
        known.swapped.holder_epoch = 3
    return known


_SECRETS = ("holder_epoch", "root_hash", "swapped.holder_epoch")


def _forged(saying: Say, tickets: dict[str, Any]) -> ticket_pb2.Ticket:
    of_somebody_else = saying.base == "honest"
    changes = [c for c in saying.changes if not (of_somebody_else and c[0] in _SECRETS)]
    return forge(tickets.get(saying.base, tickets["fresh"]), changes)


def _assign(message: Any, name: str, value: Any) -> None:
    if isinstance(value, list | tuple):
        message.ClearField(name)
        getattr(message, name).extend(value)
        return
    with contextlib.suppress(ValueError):  # beyond what the field can carry
        setattr(message, name, value)


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
            stream.say(reserve=decode_pb2.Reserve(num_sequences=1, **own))
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
            stream.say(abort=worker_pb2.Abort(**key))
