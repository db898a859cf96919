"""Logprobs on their way through the gateway: every token's come once, whatever fails."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from quire import AsyncClient, messages
from quire.messages import Request
from quire.types import Candidate, Delta, Sampling, TokenLogprobs
from quire.v1 import decode_pb2, prefill_pb2
from services.runtime.errors import DuplicateRequest, InvalidRequest
from tests.waiting import until

from .conftest import TOKEN, Call, GatewayHarness, asked
from .fakes import FakeDecode, FakePrefill, expected, logprobs_of

PROMPT = tuple(b"qwertyuiop")
"""Letters, which are their own token ids."""

NUM_TOP = 3
TOKENS = expected(PROMPT, 8)


def of(tokens: Sequence[int], num_top: int) -> TokenLogprobs:
    """The logprobs of the last token, as a client gets those of a fake worker."""
    told = logprobs_of(tokens, num_top)
    top = zip(told.top_token_ids, told.top_logprobs, strict=True)
    return TokenLogprobs(
        Candidate(tokens[-1], told.logprob, told.rank, bytes([tokens[-1]])),
        tuple(Candidate(i, value, rank, bytes([i])) for rank, (i, value) in enumerate(top, 1)),
    )


@pytest.fixture
def workers() -> tuple[FakePrefill, FakeDecode]:
    return FakePrefill(), FakeDecode()


OF_TOKENS = [of([*PROMPT, *TOKENS[:end]], NUM_TOP) for end in range(1, 9)]
OF_PROMPT = [of(PROMPT[:end], 2) for end in range(2, len(PROMPT) + 1)]


async def test_logprobs_come_only_when_asked_for(make_harness: Any, workers: Any) -> None:
    harness = await make_harness(*workers)
    call = Call(harness.gateway, asked(prompt=PROMPT))
    await call.result()
    assert call.tokens == TOKENS
    assert not any(delta.logprobs or delta.prompt for delta in call.deltas)
    (submit,) = workers[0].commands(prefill_pb2.PrefillSubmit)
    assert not submit.HasField("prompt_logprobs")
    assert not submit.ticket.sampling.HasField("logprobs")


async def test_a_prompt_too_long_for_its_logprobs_is_refused(
    make_harness: Any, workers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not fit into a message; the error has the numbers."""
    monkeypatch.setattr("services.gateway.chat.admission.MAX_LOGPROBS_PER_MESSAGE", 209)
    harness = await make_harness(*workers)
    request = asked(prompt=PROMPT, sampling={"prompt_logprobs": 20})
    with pytest.raises(InvalidRequest, match="20 of 10 tokens are 210 logprobs, at most 209"):
        await Call(harness.gateway, request).result()
    assert not workers[0].seen


async def test_a_client_that_moves_gets_the_rest_once(make_harness: Any, workers: Any) -> None:
    """The parked request has more tokens than the client, but no gateway kept their logprobs, so
    these tokens are drawn again."""
    prefill, decode = workers
    first: GatewayHarness = await make_harness(prefill, decode)
    second = await first.another()
    decode.parks, decode.pause_after = True, 5
    async with AsyncClient(await second.listen()) as client:
        lost = Call(first.gateway, _greedy("r1"))
        await until(lambda: len(lost.tokens) == 5)
        await first.lose_workers()
        await until(lambda: bool(decode.parked))
        await lost.cancel()
        decode.go_on(pause_after=8)
        received = await _rest(client, TOKENS[:3])
    tokens = [token for delta in received for token in delta.token_ids]
    assert tokens == TOKENS[3:]
    assert [each for delta in received for each in delta.logprobs] == OF_TOKENS[3:]
    assert not any(delta.prompt_logprobs for delta in received)
    assert not decode.parked  # it was found
    assert list(prefill.submitted[-1].sequences[0].token_ids) == TOKENS[:3]


async def test_a_resumed_call_without_tokens_gets_prompt_logprobs_again(
    make_harness: Any, workers: Any
) -> None:
    """The gateway still considers the request running: the new call gets all of it."""
    prefill, decode = workers
    harness: GatewayHarness = await make_harness(prefill, decode)
    decode.pause_after = 4
    lost = Call(harness.gateway, _greedy("r1"))
    await until(lambda: len(lost.tokens) == 4)
    async with AsyncClient(await harness.listen()) as client:
        reading = asyncio.create_task(_rest(client, []))
        await until(lambda: len(prefill.submitted) == 2)
        decode.go_on(pause_after=8)
        received = await reading
    with pytest.raises(DuplicateRequest):
        await lost.result()
    assert [token for delta in received for token in delta.token_ids] == TOKENS
    assert [each for delta in received for each in delta.logprobs] == OF_TOKENS
    assert list(received[0].prompt_logprobs) == OF_PROMPT
    assert len(decode.commands(decode_pb2.Admit)) == 2


def _greedy(request_id: str) -> Any:
    sampling = {"logprobs": NUM_TOP, "prompt_logprobs": 2, "seed": 7}
    return asked(request_id, prompt=PROMPT, sampling=sampling)


async def _rest(client: AsyncClient, received: list[int]) -> list[Delta]:
    """The deltas for a client that has some tokens already."""
    sampling = Sampling(0.0, seed=7, max_tokens=8, logprobs=NUM_TOP, prompt_logprobs=2)
    message = messages.generate_request(Request(list(PROMPT), sampling, request_id="r1"))
    message.resume_token = TOKEN
    message.received.sequences.add(token_ids=received)
    message.received.SetInParent()
    async with asyncio.timeout(20):
        call = client._gateways.current.inference.Generate(message)
        return [delta async for response in call for delta in messages.deltas(response)]
