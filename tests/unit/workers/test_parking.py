"""The requests that a decode worker keeps of a lost gateway, and the gateways to which it gives
them."""

from dataclasses import replace
from typing import Any

import pytest

from services.protocol.messages import Failed, Requeued, RequeueReason, Resume
from services.protocol.ticket import SamplingParams, Ticket, TicketSequence
from services.runtime.errors import InvalidRequest

from .conftest import MakePair, WorkerPair
from .fakes import PROMPT, FakeSession, expected, ticket
from .runs import finished, outputs, start

NUM_TOKENS = 60
ASKED = ticket("r1", PROMPT, max_tokens=NUM_TOKENS)


@pytest.fixture
async def pair(make_pair: MakePair) -> WorkerPair:
    """`r1` runs at the decode worker, and its gateway has some tokens."""
    pair = await make_pair(park_window_s=30.0)
    await start(pair, ASKED)
    await pair.until(lambda: len(outputs(pair.session, "r1")) > 7)
    return pair


def wanted(num_received: int, **changes: Any) -> Ticket:
    """Another gateway's request, whose client has so many tokens."""
    received = TicketSequence(0, tuple(expected(PROMPT, num_received)))
    fields: dict[str, Any] = {"attempt": 7, "sequences": (received,)}
    return replace(ASKED, **fields | changes)


def lookup(asked: Ticket) -> Resume:
    return Resume(*asked.key, asked.digest)


async def answer(pair: WorkerPair, session: FakeSession, asked: Ticket) -> Ticket | None:
    """The parked ticket; None: the worker does not have the request."""
    pair.decode.role.resume(session, lookup(asked))
    await pair.until(lambda: bool(session.of(Requeued)))
    requeued = session.of(Requeued)[0]
    assert (requeued.request_id, requeued.attempt) == asked.key
    given: Ticket | None = requeued.ticket
    return given


async def goes_on(pair: WorkerPair, session: FakeSession, given: Ticket | None) -> None:
    """Each position was computed once, and all tokens are those of an undisturbed run."""
    assert given is not None
    assert given.sequences[0].block_ids
    pair.decode.role.reserve(session, "r1", 8, 1)
    pair.decode.role.admit(session, replace(given, attempt=8))
    await pair.until(lambda: finished(session, "r1"))
    so_far = list(given.sequences[0].token_ids)
    rest = [o.token_ids[0] for o in outputs(session, "r1") if o.attempt == 8]
    assert [*so_far, *rest] == expected(PROMPT, NUM_TOKENS)
    assert pair.arena.num_computed == len(PROMPT) + NUM_TOKENS - 1
    await pair.until_empty()
    assert not pair.decode.role.jobs._timers


async def parked(pair: WorkerPair) -> None:
    pair.decode.role.close(pair.session)
    await pair.until(lambda: bool(pair.decode.role.jobs.detached(ASKED.holder_id)))


async def test_a_parked_sequence_goes_on_at_another_gateway(pair: WorkerPair) -> None:
    await parked(pair)
    assert pair.decode.role.load().num_free_slots == 16
    another = FakeSession()
    await goes_on(pair, another, await answer(pair, another, wanted(3)))


async def test_a_parked_sequence_is_not_given_to_a_gateway_that_lacks_tokens(
    pair: WorkerPair,
) -> None:
    """Its client has moved to another gateway, which asks first."""
    another = FakeSession()
    given = await answer(pair, another, wanted(3))
    (failed,) = pair.session.of(Failed)
    assert (failed.request_id, failed.attempt, failed.code) == ("r1", 1, "duplicate_request")
    pair.decode.role.close(pair.session)  # what it had is not its own any more
    pair.decode.role.abort(pair.session, "r1", 1)
    await goes_on(pair, another, given)


async def test_a_lookup_during_parking_is_answered_once(pair: WorkerPair) -> None:
    pair.decode_model.gate.clear()
    pair.decode.role.close(pair.session)
    another = FakeSession()
    pair.decode.role.resume(another, lookup(wanted(3)))
    pair.decode_model.gate.set()
    await pair.until(lambda: bool(another.of(Requeued)))
    await pair.decode.writer.flush()
    (only,) = another.of(Requeued)
    assert not pair.session.of(Requeued)
    await goes_on(pair, another, only.ticket)


async def test_a_parked_request_is_given_to_one_gateway_after_another(pair: WorkerPair) -> None:
    """If the gateway is lost before it has claimed the ticket."""
    await parked(pair)
    second, third = FakeSession(), FakeSession()
    await answer(pair, second, wanted(3))
    pair.decode.role.close(second)
    await goes_on(pair, third, await answer(pair, third, wanted(4)))


@pytest.mark.parametrize(
    "changes",
    [
        {"request_id": "r2"},
        {"prompt_token_ids": (*PROMPT[:-1], 5)},
        {"root_hash": b"s" * 16},
        {"sampling": SamplingParams(0.0, 0, 1.0, 0.0, seed=1, max_tokens=NUM_TOKENS + 1)},
    ],
    ids=["another id", "another prompt", "another salt", "other parameters"],
)
async def test_a_lookup_with_a_wrong_identity_gets_nothing(
    pair: WorkerPair, changes: dict[str, Any]
) -> None:
    await parked(pair)
    other, owner = FakeSession(), FakeSession()
    given = await answer(pair, other, wanted(3, **changes))
    assert given is None
    assert other.of(Requeued)[0].reason is RequeueReason.STALE_TICKET
    await goes_on(pair, owner, await answer(pair, owner, wanted(3)))


async def test_a_requested_entry_displaces_no_other(pair: WorkerPair) -> None:
    """An attempt is one job: a displaced job would belong to no request."""
    await parked(pair)
    owner = FakeSession()
    pair.decode.role.reserve(owner, "r1", 7, 1)
    with pytest.raises(InvalidRequest, match="attempt 7"):
        pair.decode.role.resume(owner, lookup(wanted(3)))
    pair.decode.role.abort(owner, "r1", 7)
    await goes_on(pair, owner, await answer(pair, owner, wanted(3)))


async def test_a_parked_sequence_is_released_after_the_window(make_pair: MakePair) -> None:
    pair = await make_pair(park_window_s=0.02)
    await start(pair, ASKED)
    pair.decode.role.close(pair.session)
    await pair.until_empty()
    late = FakeSession()
    assert await answer(pair, late, wanted(1)) is None


async def test_a_demand_ends_a_parked_sequence(pair: WorkerPair) -> None:
    await parked(pair)
    pair.decode.role.preempt([ASKED.holder_id])
    await pair.until_empty()


@pytest.mark.parametrize(("temperature", "is_found"), [(0.0, True), (1.0, False)])
async def test_the_seed_is_compared_for_sampled_requests_only(
    pair: WorkerPair, temperature: float, is_found: bool
) -> None:
    """A gateway draws a seed if the client gave none; another one can know it only for a greedy
    request."""
    sampling = SamplingParams(temperature, 0, 1.0, 0.0, seed=5, max_tokens=NUM_TOKENS)
    drawn = replace(ASKED, sampling=sampling)
    pair.decode.role.abort(pair.session, "r1", 1)
    await pair.until_empty()
    await start(pair, replace(drawn, holder_id="h-again"))
    pair.decode.role.close(pair.session)
    await pair.until(lambda: bool(pair.decode.role.jobs.detached("h-again")))
    given = await answer(
        pair, FakeSession(), wanted(1, sampling=replace(sampling, seed=6), holder_id="h-x")
    )
    assert (given is not None) == is_found


def test_a_ticket_is_found_by_services_of_the_version_before() -> None:
    """Services of d969b5d5 give this ticket the same digest."""
    sampling = SamplingParams(
        seed=7, max_tokens=9, temperature=0.5, top_p=0.9, logit_bias=((3, 1.5),), n=3
    )
    asked = replace(ASKED, root_hash=b"x" * 16, prompt_token_ids=(1, 2, 3), sampling=sampling)
    assert asked.digest.hex() == "a563c7c8bfae3b1c3f85c6c4463cbfc3"
