"""`best_of` over real streams, with fake workers."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from quire import AsyncClient
from quire import InvalidRequest as Refused
from quire.types import Beam, Completion, Sampling
from quire.v1 import decode_pb2
from services.common.errors import DeadlineExceeded, DuplicateRequest, InvalidRequest
from services.gateway.frontend.api import Received
from services.protocol.ticket import FinishReason
from tests.proxy import Proxy
from tests.waiting import until

from .conftest import PROMPT, Call, GatewayHarness, asked
from .fakes import FakeDecode, FakePrefill, expected, logprobs_of

NUM, NUM_BEST, NUM_TOKENS = 8, 3, 8
CHOOSING = {"n": NUM_BEST, "best_of": NUM}


def mean_logprob(tokens: Sequence[int]) -> float:
    of_each = [logprobs_of([*PROMPT, *tokens[:end]], 0) for end in range(1, len(tokens) + 1)]
    return sum(each.logprob for each in of_each) / len(of_each)


ALL = [expected(PROMPT, NUM_TOKENS, index) for index in range(NUM)]
BEST = sorted(ALL, key=mean_logprob, reverse=True)[:NUM_BEST]


@pytest.fixture
def workers() -> tuple[FakePrefill, FakeDecode]:
    return FakePrefill(), FakeDecode()


@pytest.fixture
async def harness(make_harness: Any, workers: Any) -> GatewayHarness:
    made: GatewayHarness = await make_harness(*workers)
    return made


def told(call: Call) -> list[list[int]]:
    """The text of each delta; they have the indices 0, 1, ..."""
    assert [delta.index for delta in call.deltas] == list(range(len(call.deltas)))
    return [list(delta.token_ids) for delta in call.deltas]


def choosing(**fields: Any) -> Any:
    return asked(sampling=CHOOSING | fields.pop("sampling", {}), **fields)


async def test_the_best_come_at_the_end(harness: GatewayHarness, workers: Any) -> None:
    """All samples come from one computation of the prompt. Only the best are sent, and all are
    counted."""
    prefill, decode = workers
    decode.pause_after = NUM_TOKENS - 1
    call = Call(harness.gateway, choosing())
    await until(lambda: all(r.num_generated == NUM_TOKENS - 1 for r in decode.running.values()))
    assert not call.deltas
    decode.go_on(pause_after=NUM_TOKENS)
    last = await call.result()
    assert told(call) == BEST
    assert [delta.score for delta in call.deltas] == pytest.approx([mean_logprob(t) for t in BEST])
    assert not any(delta.logprobs for delta in call.deltas)
    assert last.usage is not None
    assert last.usage.num_generated_tokens == NUM * NUM_TOKENS
    (ticket,) = prefill.submitted
    assert ticket.sampling.logprobs == 0
    (reserve,) = decode.commands(decode_pb2.Reserve)
    assert reserve.num_sequences == NUM
    await until(lambda: not decode.slots)


@pytest.mark.parametrize("best_of", [None, NUM_BEST])
async def test_without_best_of_no_logprobs_are_requested(
    harness: GatewayHarness, workers: Any, best_of: int | None
) -> None:
    """Samples stream with their own indices, and no worker computes a logprob."""
    call = Call(harness.gateway, asked(sampling={"n": NUM_BEST, "best_of": best_of}))
    await call.result()
    tokens = {
        index: [t for d in call.deltas if d.index == index for t in d.token_ids]
        for index in range(NUM_BEST)
    }
    assert tokens == dict(enumerate(ALL[:NUM_BEST]))
    assert len(call.deltas) > NUM_BEST
    assert not any(delta.score for delta in call.deltas)
    (ticket,) = workers[0].submitted
    assert not ticket.sampling.HasField("logprobs")


async def test_requested_logprobs_are_those_of_the_best(harness: GatewayHarness) -> None:
    call = Call(harness.gateway, choosing(sampling={"logprobs": 2}))
    await call.result()
    assert told(call) == BEST
    for delta in call.deltas:
        tokens = [*PROMPT, *delta.token_ids]
        expected_ = [
            logprobs_of(tokens[:end], 2).logprob for end in range(len(PROMPT) + 1, len(tokens) + 1)
        ]
        assert [each.chosen.logprob for each in delta.logprobs] == expected_
        assert all(len(each.top) == 2 for each in delta.logprobs)


# ── whatever happens ─────────────────────────────────────────────────────────────────────────────


async def half_way(harness: GatewayHarness, decode: FakeDecode, **fields: Any) -> Call:
    decode.pause_after = 4
    call = Call(harness.gateway, choosing(**fields))
    await until(lambda: "r1" in decode.running and decode.running["r1"].num_generated == 4)
    return call


async def test_a_cancelled_best_of_releases_everything(
    harness: GatewayHarness, workers: Any
) -> None:
    decode = workers[1]
    call = await half_way(harness, decode)
    await call.cancel()
    await until(lambda: decode.aborted == [("r1", 1)] and not decode.slots)
    assert not call.deltas


async def test_the_deadline_ends_best_of_without_an_answer(
    harness: GatewayHarness, workers: Any
) -> None:
    """The samples drawn by then have no answer."""
    decode = workers[1]
    call = await half_way(harness, decode, timeout_s=0.3)
    with pytest.raises(DeadlineExceeded):
        await call.result()
    await until(lambda: not decode.slots)
    assert not call.deltas


# ── clients that go on ───────────────────────────────────────────────────────────────────────────


@pytest.fixture
async def proxied(harness: GatewayHarness) -> AsyncIterator[list[Proxy]]:
    """Two gateways on the same workers, each behind a proxy."""
    proxies = [Proxy(await each.listen()) for each in (harness, await harness.another())]
    for proxy in proxies:
        await proxy.__aenter__()
    yield proxies
    for proxy in proxies:
        await proxy.__aexit__(None, None, None)


def tokens_of(completion: Completion) -> list[list[int]]:
    return [list(choice.token_ids) for choice in completion.choices]


@pytest.mark.parametrize("parks", [False, True])
async def test_a_client_goes_on_at_another_gateway(
    harness: GatewayHarness, proxied: list[Proxy], workers: Any, parks: bool
) -> None:
    """The client has received nothing, and only the lost gateway knew the logprobs: all samples are
    drawn again, with the same result."""
    prefill, decode = workers
    decode.parks, decode.pause_after = parks, 4
    async with AsyncClient(",".join(proxy.address for proxy in proxied)) as client:
        sampling = Sampling(0.0, max_tokens=NUM_TOKENS, n=NUM_BEST, best_of=NUM)
        completing = asyncio.create_task(client.complete(list(PROMPT), sampling, timeout_s=20))
        await until(lambda: any(r.num_generated == 4 for r in decode.running.values()))
        if parks:
            await harness.lose_workers()
            await until(lambda: bool(decode.parked))
        await proxied[0].close()
        decode.go_on(pause_after=NUM_TOKENS)
        completion = await completing
    assert tokens_of(completion) == BEST
    assert completion.usage.num_generated_tokens == NUM * NUM_TOKENS
    assert [choice.score for choice in completion.choices] == pytest.approx(
        [mean_logprob(tokens) for tokens in BEST]
    )
    assert not prefill.submitted[-1].sequences[0].token_ids
    await until(lambda: not decode.slots and not decode.parked)


async def test_a_second_call_at_the_same_gateway_takes_the_request_over(
    harness: GatewayHarness, workers: Any
) -> None:
    """Nothing is drawn again."""
    prefill, decode = workers
    lost = await half_way(harness, decode)
    call = Call(harness.gateway, choosing(received=()))
    with pytest.raises(DuplicateRequest):
        await lost.result()
    decode.go_on(pause_after=NUM_TOKENS)
    last = await call.result()
    assert told(call) == BEST
    assert last.usage is not None
    assert last.usage.num_generated_tokens == NUM * NUM_TOKENS
    assert len(prefill.submitted) == 1


async def test_a_resumed_call_with_the_best_gets_the_others(harness: GatewayHarness) -> None:
    received = (Received(0, tuple(BEST[0]), FinishReason.LENGTH),)
    call = Call(harness.gateway, choosing(received=received))
    await call.result()
    assert [(d.index, list(d.token_ids)) for d in call.deltas] == list(enumerate(BEST))[1:]


# ── what is refused ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("sampling", "problem"),
    [
        ({"best_of": 0}, r"best_of is 0, not in \[1, 64\]; n is 1"),
        ({"n": 3, "best_of": 2}, r"best_of is 2, not in \[3, 64\]; n is 3"),
        ({"best_of": 65}, r"best_of is 65, not in \[1, 64\]"),
        ({"n": 0, "best_of": 2}, "n is 0"),
        ({"n": 2, "best_of": 9}, "9 sequences; the decode workers run at most 8 at a time"),
        ({"best_of": 4, "beam": Beam(4)}, "best_of is 4: a beam search does without"),
    ],
)
async def test_contradictory_numbers_are_refused_and_named(
    make_harness: Any, sampling: dict[str, Any], problem: str
) -> None:
    """The client library refuses them, and gRPC too."""
    prefill = FakePrefill()
    harness = await make_harness(prefill, FakeDecode(num_slots=8))
    async with AsyncClient(await harness.listen()) as client:
        with pytest.raises(Refused, match=problem):
            await client.complete(list(PROMPT), Sampling(max_tokens=4, **sampling))
    assert not prefill.seen


async def test_more_logprobs_than_a_message_holds_are_refused(
    harness: GatewayHarness, workers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequence comes in one message."""
    monkeypatch.setattr("services.gateway.intake.admission.MAX_LOGPROBS_PER_MESSAGE", 23)
    with pytest.raises(InvalidRequest, match="logprobs 2 of 8 tokens are 24 logprobs, at most 23"):
        await Call(harness.gateway, choosing(sampling={"logprobs": 2})).result()
    assert not workers[0].seen
    await Call(harness.gateway, asked(sampling={"n": NUM, "logprobs": 2})).result()


async def test_a_resume_with_a_part_of_a_best_sample_is_refused(
    harness: GatewayHarness, workers: Any
) -> None:
    received = (Received(0, tuple(BEST[0][:4])),)
    with pytest.raises(
        InvalidRequest, match="part of sequence 0 received; with best_of each comes"
    ):
        await Call(harness.gateway, choosing(received=received)).result()
    assert not workers[0].seen
