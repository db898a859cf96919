"""How hostile workers change the messages that they would send, and the messages that they add."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from quire.v1 import decode_pb2, prefill_pb2, ticket_pb2
from tests.fuzz.field_changes import CHANGES, FIELDS, IDS
from tests.fuzz.forging import Changes, change
from tests.integration.gateway.fakes import state_of

_ROLES = {"prefilled": (0,), "step": (1,), "reserved": (1,)}
_RESPONSES = prefill_pb2.PrefillConnectResponse, decode_pb2.DecodeConnectResponse


# Changes of the messages that they would send anyway


@dataclass(frozen=True)
class Corruption:
    """A changed message: `how` it is sent, and the change of its fields if it is of `kind`."""

    how: str
    kind: str = ""
    changes: Changes = ()

    def of(self, message: Any, kept: list[Any]) -> Iterator[Any]:
        kind = message.WhichOneof("event")
        if self.how == "changed" and kind == self.kind:
            for path, value in self.changes:
                change(getattr(message, kind), path, value)
        if self.how == "kept":
            kept.append(message)
        elif self.how != "dropped":
            yield message
        if self.how == "twice":
            yield message
        if self.how == "with what was kept":
            yield from kept
            kept.clear()


CORRUPTIONS = st.one_of(
    st.builds(
        Corruption, st.sampled_from(["", "", "dropped", "twice", "kept", "with what was kept"])
    ),
    *(
        st.builds(Corruption, st.just("changed"), st.just(kind), CHANGES[kind])
        for kind in ("prefilled", "step", "requeue", "reserved")
    ),
)


# Messages that they add


@dataclass(frozen=True)
class Unsolicited:
    """An added message. `at`: after so many messages. `ticket_of`: the request whose last ticket,
    with its blocks, it contains."""

    to: int
    at: int
    kind: str
    request_id: str
    attempt: int
    changes: Changes

    def message(self, seen: Sequence[Any]) -> Any:
        message = _RESPONSES[self.to]()
        inner = getattr(message, self.kind)
        inner.SetInParent()
        match self.kind:
            case "prefilled" | "requeue":
                known = _known(seen, self.request_id)
                inner.ticket.CopyFrom(state_of(known))
                about = inner.ticket
                if self.kind == "prefilled":
                    _draw(inner, len(known.prompt_token_ids), self.request_id, self.attempt)
            case "step":
                about = inner.outputs.add(token_ids=[97])
            case _:
                about = inner
        if self.kind != "load":
            about.request_id, about.attempt = self.request_id, self.attempt
        for path, value in self.changes:
            change(inner, path, value)
        return message


def _draw(prefilled: prefill_pb2.Prefilled, num_prompt: int, request_id: str, attempt: int) -> None:
    """A token of each sequence of the ticket that it received."""
    for sequence in prefilled.ticket.sequences:
        position = num_prompt + len(sequence.token_ids)
        key = {"request_id": request_id, "attempt": attempt, "index": sequence.index}
        prefilled.outputs.add(position=position, token_ids=[97], **key)
        sequence.token_ids.append(97)
        sequence.block_ids.append(0)


def _known(seen: Sequence[Any], request_id: str) -> ticket_pb2.Ticket:
    tickets = [command.ticket for command in seen if hasattr(command, "ticket")]
    return next((t for t in reversed(tickets) if t.request_id == request_id), ticket_pb2.Ticket())


def _unsolicited(to: int) -> st.SearchStrategy[Unsolicited]:
    kinds = [kind for kind in FIELDS if to in _ROLES.get(kind, (0, 1))]
    return st.one_of(
        *(
            st.builds(
                Unsolicited,
                st.just(to),
                st.integers(0, 12),
                st.just(kind),
                st.sampled_from(IDS),
                st.integers(1, 8),
                st.just(()) | CHANGES[kind],
            )
            for kind in kinds
        )
    )


@dataclass
class Attack:
    """All that one hostile worker does beside its work."""

    corrupted: list[Corruption]
    unsolicited: list[Unsolicited]
    kept: list[Any] = field(default_factory=list)
    num_sent: int = 0

    def corrupt(self, message: Any, seen: Sequence[Any]) -> Iterator[Any]:
        for added in self.unsolicited:
            if added.at == self.num_sent:
                yield added.message(seen)
        self.num_sent += 1
        if not self.corrupted:
            yield message
        else:
            yield from self.corrupted.pop(0).of(message, self.kept)


ATTACKS = st.tuples(
    *[
        st.builds(Attack, st.lists(CORRUPTIONS, max_size=8), st.lists(_unsolicited(to), max_size=5))
        for to in (0, 1)
    ]
)
"""For a prefill and a decode worker."""
