"""Broken and hostile workers at the gateway's streams: whatever they say, of their own requests or
of others', no token that a client has is lost, repeated or changed (law 7), every request comes to
a clear end, and the gateway keeps nothing of it."""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.v1 import decode_pb2, prefill_pb2, ticket_pb2
from services.common.errors import QuireError
from services.gateway.api import Delta
from tests.fuzz.house import VOCAB, House, Wire
from tests.integration.gateway.conftest import PROMPT, Call, asked, write_model
from tests.integration.gateway.fakes import FakeDecode, FakePrefill, expected
from tests.property.late import VirtualLoop

HANG_S = 600.0  # of virtual time
MAX_TOKENS = 8
NUM_REQUESTS = 4
IDS = [f"r{number}" for number in range(NUM_REQUESTS)]
NUM_SEQUENCES = dict(zip(IDS, (1, 1, 2, 3), strict=True))

NUMBERS = st.sampled_from([0, 1, 2, 3, 7, 8, 15, 16, 17, 255, 256, 300, 2**31, 2**32 - 1])
LARGE = NUMBERS | st.sampled_from([2**52 - 1, 2**52, 2**53, 2**64 - 1])
TOKENS = st.lists(st.sampled_from([0, 97, 98, 122, 299, 300, 2**32 - 1]), max_size=10)
BLOCKS = st.lists(NUMBERS, max_size=4)
NAMES = st.sampled_from([*IDS, "", "nobody", "x" * 300])
FLOATS = st.sampled_from([0.0, 0.5, 1.0, -1.0, float("nan")])
TICKET: dict[str, st.SearchStrategy[Any]] = {
    "request_id": NAMES,
    "attempt": NUMBERS,
    "order": LARGE,
    "pool_id": st.sampled_from(["pool", "other", ""]),
    "holder_id": NAMES,
    "holder_epoch": LARGE,
    "root_hash": st.sampled_from([b"", bytes(16), b"x" * 16]),
    "prompt_token_ids": TOKENS,
    "num_cached_tokens": NUMBERS,
    "timeout_ms": LARGE,
    "prefill_ns_per_token": NUMBERS,
    "sampling.seed": LARGE,
    "sampling.temperature": FLOATS,
    "sampling.max_tokens": NUMBERS,
    "sampling.logprobs": NUMBERS,
    "sequences": st.sampled_from(["none", "first", "reversed"]),
    "sequences.index": NUMBERS,
    "sequences.token_ids": TOKENS,
    "sequences.block_ids": BLOCKS,
    "sequences.num_computed_tokens": NUMBERS,
    "swapped.pool_id": NAMES,
    "swapped.holder_id": NAMES,
    "swapped.holder_epoch": LARGE,
    "swapped.tables.index": NUMBERS,
    "swapped.tables.block_ids": BLOCKS,
}
LOGPROB = st.sampled_from([0.0, -1.5, -1e30, 0.5, float("nan"), float("inf"), float("-inf")])
LOGPROBS: dict[str, st.SearchStrategy[Any]] = {
    "logprob": LOGPROB,
    "rank": NUMBERS,
    "top_token_ids": TOKENS | st.sampled_from([[97, 300], [97, 97], [97]]),
    "top_logprobs": st.lists(LOGPROB, max_size=4),
}
OUTPUT: dict[str, st.SearchStrategy[Any]] = {
    "request_id": NAMES,
    "attempt": NUMBERS,
    "index": NUMBERS,
    "position": NUMBERS,
    "token_ids": TOKENS,
    "finish_reason": st.sampled_from([0, 1, 2, 3, 99]),
    **{f"logprobs.{name}": values for name, values in LOGPROBS.items()},
}
LOGPROBS_ASKED: dict[str, dict[str, int]] = {
    "r0": {"logprobs": 2, "prompt_logprobs": 1},
    "r1": {"logprobs": 0},
    "r2": {},
    "r3": {"prompt_logprobs": 0},
}
CODES = ["invalid_request", "kv_corrupt", "queue_full", "nobody's", "", "x" * 5000]
FIELDS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "prefilled": {f"ticket.{name}": values for name, values in TICKET.items()}
    | {f"outputs.{name}": values for name, values in OUTPUT.items()}
    | {f"prompt_logprobs.{name}": values for name, values in LOGPROBS.items()}
    | {"outputs": st.sampled_from(["none", "first", "reversed"])},
    "requeue": {f"ticket.{name}": values for name, values in TICKET.items()}
    | {"reason": st.sampled_from([0, 1, 2, 3, 4, 99])},
    "step": {f"outputs.{name}": values for name, values in OUTPUT.items()},
    "reserved": {"request_id": NAMES, "attempt": NUMBERS, "granted": st.booleans()},
    "failed": {
        "request_id": NAMES,
        "attempt": NUMBERS,
        "code": st.sampled_from(CODES),
        "message": st.sampled_from(["", "no", "x" * 100_000]),
    },
    "load": {
        "num_running": NUMBERS,
        "num_free_slots": NUMBERS,
        "num_pending_tokens": LARGE,
        "draining": st.booleans(),
        "stalled": st.booleans(),
    },
}
ROLES = {"prefilled": (0,), "step": (1,), "reserved": (1,)}
RESPONSES = prefill_pb2.PrefillConnectResponse, decode_pb2.DecodeConnectResponse
Changes = tuple[tuple[str, Any], ...]


def changes(kind: str) -> st.SearchStrategy[Changes]:
    one = st.sampled_from(sorted(FIELDS[kind])).flatmap(
        lambda path: st.tuples(st.just(path), FIELDS[kind][path])
    )
    return st.lists(one, min_size=1, max_size=2).map(tuple)


CHANGES = {kind: changes(kind) for kind in FIELDS}


def change(message: Any, path: str, value: Any) -> None:
    """What a field cannot carry is left out."""
    first, _, rest = path.partition(".")
    if rest:
        inner = getattr(message, first)
        for each in inner if hasattr(inner, "add") else [inner]:
            change(each, rest, value)
        return
    if first in ("sequences", "outputs"):
        there = list(getattr(message, first))
        message.ClearField(first)
        kept = {"none": [], "first": there[:1], "reversed": there[::-1]}[value]
        getattr(message, first).extend(kept)
        return
    with contextlib.suppress(ValueError):
        if isinstance(value, list):
            message.ClearField(first)
            getattr(message, first).extend(value)
        else:
            setattr(message, first, value)


# Of what they would say anyway


@dataclass(frozen=True)
class Spoilt:
    """What becomes of a message: `how` it is sent, and what is changed in it if it is of `kind`."""

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


SPOILT = st.one_of(
    st.builds(Spoilt, st.sampled_from(["", "", "dropped", "twice", "kept", "with what was kept"])),
    *(
        st.builds(Spoilt, st.just("changed"), st.just(kind), CHANGES[kind])
        for kind in ("prefilled", "step", "requeue", "reserved")
    ),
)


# Unasked


@dataclass(frozen=True)
class Unasked:
    """`at`: after so many messages that it would say anyway. `ticket_of`: it knows the last ticket
    that it was sent of that request, blocks and all."""

    to: int
    at: int
    kind: str
    request_id: str
    attempt: int
    changes: Changes

    def message(self, seen: Sequence[Any]) -> Any:
        message = RESPONSES[self.to]()
        inner = getattr(message, self.kind)
        inner.SetInParent()
        match self.kind:
            case "prefilled" | "requeue":
                inner.ticket.CopyFrom(_known(seen, self.request_id))
                about = inner.ticket
                if self.kind == "prefilled":
                    _draw(inner, self.request_id, self.attempt)
            case "step":
                about = inner.outputs.add(token_ids=[97])
            case _:
                about = inner
        if self.kind != "load":
            about.request_id, about.attempt = self.request_id, self.attempt
        for path, value in self.changes:
            change(inner, path, value)
        return message


def _draw(prefilled: prefill_pb2.Prefilled, request_id: str, attempt: int) -> None:
    """A token of each sequence of the ticket, which it has then."""
    for sequence in prefilled.ticket.sequences:
        position = len(prefilled.ticket.prompt_token_ids) + len(sequence.token_ids)
        key = {"request_id": request_id, "attempt": attempt, "index": sequence.index}
        prefilled.outputs.add(position=position, token_ids=[97], **key)
        sequence.token_ids.append(97)
        sequence.block_ids.append(0)


def _known(seen: Sequence[Any], request_id: str) -> ticket_pb2.Ticket:
    tickets = [command.ticket for command in seen if hasattr(command, "ticket")]
    return next((t for t in reversed(tickets) if t.request_id == request_id), ticket_pb2.Ticket())


def unasked(to: int) -> st.SearchStrategy[Unasked]:
    kinds = [kind for kind in FIELDS if to in ROLES.get(kind, (0, 1))]
    return st.one_of(
        *(
            st.builds(
                Unasked,
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
class Mischief:
    """All that one hostile worker does besides its work."""

    spoilt: list[Spoilt]
    unasked: list[Unasked]
    kept: list[Any] = field(default_factory=list)
    num_sent: int = 0

    def spoil(self, message: Any, seen: Sequence[Any]) -> Iterator[Any]:
        for saying in self.unasked:
            if saying.at == self.num_sent:
                yield saying.message(seen)
        self.num_sent += 1
        if not self.spoilt:
            yield message
        else:
            yield from self.spoilt.pop(0).of(message, self.kept)


# The test


class Client(Call):
    """Notes what is told it of its request."""

    def check(self) -> None:
        """Law 7, as far as a gateway can see: no more than asked for, no token that there is not;
        and an end with a reason that is not a fault of ours."""
        tokens = self.by_index()
        assert len(tokens) <= self.request.sampling.n
        assert all(len(each) <= MAX_TOKENS for each in tokens.values())
        assert all(token < VOCAB for token in self.tokens)
        ends = [delta.index for delta in self.deltas if delta.finish_reason]
        assert len(set(ends)) == len(ends)
        error = self.task.exception()
        if error is None:
            last: Delta = self.deltas[-1]
            assert last.finish_reason is not None
            assert last.usage is not None
            assert last.usage.num_generated_tokens == len(self.tokens)
            assert sorted(ends) == list(range(self.request.sampling.n))
        else:
            assert isinstance(error, QuireError), repr(error)
        self.check_logprobs()

    def check_logprobs(self) -> None:
        """As many as were asked for, of the tokens that are there; of the prompt once."""
        asked, vocabulary = self.request.sampling, range(VOCAB)
        told = [each for delta in self.deltas for each in delta.logprobs]
        if asked.logprobs is None:
            assert told == []
        else:
            assert [each.chosen.token_id for each in told] == self.tokens
            assert all(len(each.top) == asked.logprobs for each in told)
        prompts = [delta.prompt for delta in self.deltas if delta.prompt is not None]
        assert len(prompts) == (asked.prompt_logprobs is not None and bool(self.tokens))
        for prompt in prompts:
            assert len(prompt.logprobs) == len(prompt.token_ids) - 1
            told += prompt.logprobs
        for each in told:
            for candidate in (each.chosen, *each.top):
                assert candidate.logprob <= 0  # and a number
                assert candidate.token_id in vocabulary
                assert 0 < candidate.rank <= VOCAB

    def by_index(self) -> dict[int, list[int]]:
        tokens: dict[int, list[int]] = {}
        for delta in self.deltas:
            tokens.setdefault(delta.index, []).extend(delta.token_ids)
        return tokens

    def check_tickets(self, seen: Sequence[Any]) -> None:
        """What workers are sent is what the client asked for, and has got: all that it was written,
        but for what an error came in the place of."""
        tokens, failed = self.by_index(), self.task.exception() is not None
        for command in seen:
            if isinstance(command, prefill_pb2.PrefillSubmit | decode_pb2.Admit):
                ticket = command.ticket
                if ticket.request_id != self.request.request_id:
                    continue
                assert tuple(ticket.prompt_token_ids) == self.request.prompt
                assert 0 < len(ticket.sequences) <= self.request.sampling.n
                for sequence in ticket.sequences:
                    sent, got = list(sequence.token_ids), tokens.get(sequence.index, [])
                    assert sent[: len(got) if failed else None] == got[: len(sent)]
                assert ticket.sampling.max_tokens == MAX_TOKENS
                assert ticket.sampling.temperature == 0


async def live(directory: Path, mischiefs: Sequence[Mischief], at_once: bool) -> None:
    honest = FakePrefill("prefill-1"), FakeDecode("decode-1")
    hostile: tuple[FakePrefill | FakeDecode, ...] = (
        FakePrefill("prefill-2"),
        FakeDecode("decode-2"),
    )
    house = House(directory)
    await house.open(*honest, *hostile)
    for fake, mischief in zip(hostile, mischiefs, strict=True):
        wire: Wire = house.line(fake).session
        wire.spoil = lambda message, m=mischief, seen=fake.seen: m.spoil(message, seen)  # type: ignore[misc]
    clients = []
    for request_id in IDS:
        prompt = (*PROMPT, *request_id.encode())
        sampling = {"n": NUM_SEQUENCES[request_id], **LOGPROBS_ASKED[request_id]}
        request = asked(request_id, MAX_TOKENS, prompt=prompt, sampling=sampling)
        clients.append(Client(house.gateway, request))
        if not at_once:
            await asyncio.sleep(0)
    await asyncio.sleep(1.0)
    for fake in hostile:  # it is found out, or dies
        house.line(fake).lose()
    async with asyncio.timeout(HANG_S):
        await asyncio.wait([client.task for client in clients])
    for client in clients:
        client.check()
        for fake in (*honest, *hostile):
            client.check_tickets(fake.seen)
    check_nothing_left(house, honest)
    await house.close()


def check_nothing_left(house: House, honest: tuple[FakePrefill, FakeDecode]) -> None:
    dispatcher = house.dispatcher
    assert (dispatcher.num_waiting, dispatcher.num_running) == (0, 0)
    assert not dispatcher._journeys
    for line in house.lines:
        assert not line.worker.guests, line.worker
        assert not line.worker.errands, line.worker
    prefill, decode = honest
    assert not prefill.held
    assert not decode.running
    assert not decode.slots


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_model(directory)
    return directory


MISCHIEFS = st.tuples(
    *[
        st.builds(
            Mischief,
            st.lists(SPOILT, max_size=8),
            st.lists(unasked(to), max_size=5),
        )
        for to in (0, 1)
    ]
)


@given(mischiefs=MISCHIEFS, at_once=st.booleans())
@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_no_worker_harms_a_client(
    model_dir: Path, mischiefs: tuple[Mischief, ...], at_once: bool
) -> None:
    with contextlib.closing(VirtualLoop()) as loop:
        loop.run_until_complete(live(model_dir, mischiefs, at_once))
        assert loop.faults == []


def test_without_mischief_all_is_well(model_dir: Path) -> None:
    """The tokens are those of an undisturbed run, from all workers."""

    async def run() -> None:
        house = House(model_dir)
        fakes = FakePrefill("prefill-1"), FakeDecode("decode-1")
        await house.open(*fakes)
        call = Call(house.gateway, asked("r1", MAX_TOKENS))
        await call.result()
        assert call.tokens == expected(PROMPT, MAX_TOKENS)
        check_nothing_left(house, fakes)
        await house.close()

    with contextlib.closing(VirtualLoop()) as loop:
        loop.run_until_complete(run())
        assert loop.faults == []
