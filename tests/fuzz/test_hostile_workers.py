"""Broken and hostile workers at the gateway's streams: whatever they send, about their own requests
or others', the gateway serves on, no token that a client has is lost, repeated or changed (law 7),
every request ends, and the gateway keeps nothing of it. A worker is authenticated, so the gateway
takes the tokens, scores and logprobs of a request from the worker that computes it. The requests
have one sequence, are groups, or searches."""

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.types import Beam
from quire.v1 import decode_pb2, prefill_pb2
from services.gateway.output.delta import Delta
from tests.examples import examples
from tests.fuzz.field_changes import IDS
from tests.fuzz.fuzzed_gateway import FuzzedGateway, WorkerSession
from tests.fuzz.hostile_workers import ATTACKS, Attack
from tests.fuzz.searching_workers import SearchingDecode, SearchingPrefill, score_of
from tests.integration.gateway.conftest import PROMPT, Call, asked, write_model
from tests.integration.gateway.fakes import expected
from tests.property.late import VirtualLoop

HANG_S = 600.0  # of virtual time
MAX_TOKENS = 8
ASKED: dict[str, dict[str, Any]] = {
    "r0": {"logprobs": 2, "prompt_logprobs": 1},
    "r1": {"logprobs": 0},
    "r2": {"n": 2},
    "r3": {"n": 3, "prompt_logprobs": 0},
    "r4": {"n": 2, "beam": Beam(3)},
    "r5": {"n": 1, "beam": Beam(1)},
}


class Client(Call):
    """A client that records the deltas of its request."""

    def check(self) -> None:
        """An end of each sequence, or an error."""
        ends = [delta.index for delta in self.deltas if delta.finish_reason]
        assert len(set(ends)) == len(ends)
        if self.task.exception() is None:
            last: Delta = self.deltas[-1]
            assert last.finish_reason is not None
            assert last.usage is not None
            assert last.usage.num_generated_tokens == len(self.tokens)
            assert sorted(ends) == list(range(self.request.sampling.n))

    @property
    def searches(self) -> bool:
        return self.request.sampling.beam is not None

    def by_index(self) -> dict[int, list[int]]:
        tokens: dict[int, list[int]] = {}
        for delta in self.deltas:
            tokens.setdefault(delta.index, []).extend(delta.token_ids)
        return tokens

    def check_tickets(self, seen: Sequence[Any]) -> None:
        """Workers receive the client's request with the tokens that it has received, or would have
        without an error."""
        tokens, failed = self.by_index(), self.task.exception() is not None
        for command in seen:
            if isinstance(command, prefill_pb2.PrefillSubmit | decode_pb2.Admit):
                ticket = command.ticket
                if ticket.request_id != self.request.request_id:
                    continue
                assert tuple(ticket.prompt_token_ids) == self.request.prompt
                assert ticket.sampling.max_tokens == MAX_TOKENS
                assert ticket.sampling.temperature == 0
                if self.searches:
                    continue
                assert 0 < len(ticket.sequences) <= self.request.sampling.n
                for sequence in ticket.sequences:
                    sent, got = list(sequence.token_ids), tokens.get(sequence.index, [])
                    assert sent[: len(got) if failed else None] == got[: len(sent)]


async def run_attacks(directory: Path, attacks: Sequence[Attack], at_once: bool) -> None:
    correct = SearchingPrefill("prefill-1"), SearchingDecode("decode-1")
    hostile: tuple[SearchingPrefill | SearchingDecode, ...] = (
        SearchingPrefill("prefill-2"),
        SearchingDecode("decode-2"),
    )
    fuzzed = FuzzedGateway(directory)
    await fuzzed.open(*correct, *hostile)
    for fake, attack in zip(hostile, attacks, strict=True):
        session: WorkerSession = fuzzed.connection(fake).session
        session.corrupt = lambda message, m=attack, seen=fake.seen: m.corrupt(message, seen)  # type: ignore[misc]
    clients = []
    for request_id in IDS:
        prompt = (*PROMPT, *request_id.encode())
        request = asked(request_id, MAX_TOKENS, prompt=prompt, sampling=ASKED[request_id])
        clients.append(Client(fuzzed.gateway, request))
        if not at_once:
            await asyncio.sleep(0)
    await asyncio.sleep(1.0)
    for fake in hostile:  # its stream breaks, or it dies
        fuzzed.connection(fake).break_stream()
    async with asyncio.timeout(HANG_S):
        await asyncio.wait([client.task for client in clients])
    await serve_correctly(fuzzed)
    for client in clients:
        client.check()
        for fake in (*correct, *hostile):
            client.check_tickets(fake.seen)
    check_nothing_left(fuzzed, correct)
    await fuzzed.close()


async def serve_correctly(fuzzed: FuzzedGateway) -> None:
    """The gateway serves on when the hostile workers are gone."""
    call = Call(fuzzed.gateway, asked("after the attack", MAX_TOKENS))
    await call.result()
    assert call.tokens == expected(PROMPT, MAX_TOKENS)


def check_nothing_left(
    fuzzed: FuzzedGateway, correct: tuple[SearchingPrefill, SearchingDecode]
) -> None:
    dispatcher = fuzzed.dispatcher
    assert (dispatcher.num_waiting, dispatcher.num_running) == (0, 0)
    assert not dispatcher._requests
    for connection in fuzzed.connections:
        assert connection.worker.num_taken_slots == 0, connection.worker
        assert not connection.worker.prefill_loads, connection.worker
    prefill, decode = correct
    assert not prefill.held
    assert not decode.running
    assert not decode.searches
    assert not decode.slots


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_model(directory)
    return directory


@given(attacks=ATTACKS, at_once=st.booleans())
@settings(
    max_examples=examples(200),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_hostile_workers_change_no_answer(
    model_dir: Path, attacks: tuple[Attack, ...], at_once: bool
) -> None:
    with contextlib.closing(VirtualLoop()) as loop:
        loop.run_until_complete(run_attacks(model_dir, attacks, at_once))
        assert loop.faults == []


def test_workers_that_corrupt_nothing_are_served(model_dir: Path) -> None:
    """Without hostile workers, the tokens are those of an undisturbed run."""

    async def run() -> None:
        fuzzed = FuzzedGateway(model_dir)
        fakes = SearchingPrefill("prefill-1"), SearchingDecode("decode-1")
        await fuzzed.open(*fakes)
        for name, sampling in ASKED.items():
            call = Client(fuzzed.gateway, asked(name, MAX_TOKENS, sampling=sampling))
            await call.result()
            number = sampling.get("n", 1)
            assert call.by_index() == {i: expected(PROMPT, MAX_TOKENS, i) for i in range(number)}
            if call.searches:
                scores = [delta.score for delta in call.deltas]
                assert scores == [score_of(i, MAX_TOKENS) for i in range(number)]
        check_nothing_left(fuzzed, fakes)
        await fuzzed.close()

    with contextlib.closing(VirtualLoop()) as loop:
        loop.run_until_complete(run())
        assert loop.faults == []
