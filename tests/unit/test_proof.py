"""Proofs of the deployment's secret: a guard and its clients, without gRPC."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from services.runtime.errors import Unauthenticated
from services.runtime.rpc.proof import MAX_AGE_S, METADATA, Guard, Proof
from tests.secret import OTHER, SECRET

KEY = SECRET.rpc_key
METHOD = "/quire.v1.Decode/Connect"


class Clock:
    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


def refusal(guard: Guard, metadata: object, method: str = METHOD) -> str:
    with pytest.raises(Unauthenticated) as refused:
        guard.answer(method, metadata)  # type: ignore[arg-type]
    return str(refused.value)


def test_client_and_server_prove_the_secret() -> None:
    proof = Proof(KEY, METHOD, "decode-1")
    answer = Guard(KEY, "decode-1").answer(METHOD, (("x-request-id", "r"), *proof.metadata))
    proof.check(((METADATA, answer),))


@pytest.mark.parametrize("value", ["", ".", "1.2.3", "..", "1.2.3.4", "\u00e9.x.y"])
def test_an_invalid_proof_is_refused(value: str) -> None:
    assert refusal(Guard(KEY, "decode-1"), ((METADATA, value),))


def test_a_call_without_a_proof_is_told_where_clients_belong() -> None:
    for metadata in (None, (), ((METADATA, b"bytes"),)):
        assert "clients talk to a gateway" in refusal(Guard(KEY, "decode-1"), metadata)


def test_a_proof_is_for_one_secret_one_server_and_one_method() -> None:
    guard = Guard(KEY, "decode-1")
    for key, method, server_id in (
        (OTHER.rpc_key, METHOD, "decode-1"),
        (SECRET.registry_key, METHOD, "decode-1"),
        (KEY, METHOD, "decode-2"),
        (KEY, "/quire.v1.Prefill/Connect", "decode-1"),
    ):
        assert "another secret, or not for" in refusal(
            guard, Proof(key, method, server_id).metadata
        )


@given(where=st.integers(0, 200), character=st.characters(codec="utf-8"), cut=st.booleans())
def test_a_proof_that_was_changed_anywhere_is_refused(
    where: int, character: str, cut: bool
) -> None:
    ((_, value),) = Proof(KEY, METHOD, "decode-1").metadata
    where %= len(value)
    changed = value[:where] if cut else value[:where] + character + value[where + 1 :]
    if changed != value:
        assert refusal(Guard(KEY, "decode-1"), ((METADATA, changed),))


def test_a_proof_counts_once() -> None:
    guard, proof = Guard(KEY, "decode-1"), Proof(KEY, METHOD, "decode-1")
    guard.answer(METHOD, proof.metadata)
    assert refusal(guard, proof.metadata) == "the proof has been used before"


@pytest.mark.parametrize("ahead_s", [-MAX_AGE_S - 1, MAX_AGE_S + 1])
def test_a_proof_of_another_time_is_refused_with_what_to_do(ahead_s: float) -> None:
    clock = Clock()
    clock.now += ahead_s
    text = refusal(Guard(KEY, "decode-1", clock), Proof(KEY, METHOD, "decode-1").metadata)
    assert text.endswith("60 s are the limit: set the clocks of both hosts")


def test_nonces_are_remembered_as_long_as_their_proofs_count_and_no_longer() -> None:
    clock = Clock()
    guard = Guard(KEY, "decode-1", clock)
    early = Proof(KEY, METHOD, "decode-1")
    clock.now -= MAX_AGE_S - 1  # the client's clock is ahead of ours by so much
    guard.answer(METHOD, early.metadata)
    clock.now += 2 * MAX_AGE_S - 2
    assert refusal(guard, early.metadata) == "the proof has been used before"
    clock.now -= MAX_AGE_S - 1
    guard.answer(METHOD, Proof(KEY, METHOD, "decode-1").metadata)
    assert len(guard._nonces) == 2
    clock.now += 2 * MAX_AGE_S + 1
    assert "old" in refusal(guard, early.metadata)


def test_a_server_that_cannot_answer_is_found_out() -> None:
    """The process listens at a dead worker's address; a recorded proof of another call does not
    help it."""
    first, second = (Proof(KEY, METHOD, "decode-1") for _ in range(2))
    replayed = Guard(KEY, "decode-1").answer(METHOD, first.metadata)
    for metadata in (None, (), ((METADATA, replayed),), second.metadata):
        with pytest.raises(Unauthenticated, match="decode-1 does not prove"):
            second.check(metadata)


class Call:
    """A call without a proof, as a guard receives it."""

    def __init__(self, peer: str) -> None:
        self._peer = peer

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def peer(self) -> str:
        return self._peer


async def test_repeated_refusals_of_a_host_are_logged_once_a_minute() -> None:
    clock = Clock()
    guard = Guard(KEY, "decode-1", clock)

    async def fail_from(host: str, times: int) -> None:
        for port in range(times):
            with pytest.raises(Unauthenticated):
                await guard.admit(METHOD, Call(f"ipv4:{host}:{40000 + port}"))  # type: ignore[arg-type]

    with capture_logs() as lines:
        await fail_from("10.0.0.1", 100)
        await fail_from("10.0.0.2", 1)
        clock.now += 61
        await fail_from("10.0.0.1", 2)
    logged = [(line["peer"], line["num_refused"]) for line in lines]
    assert logged == [
        ("ipv4:10.0.0.1:40000", 1),
        ("ipv4:10.0.0.2:40000", 1),
        ("ipv4:10.0.0.1:40000", 100),
    ]
