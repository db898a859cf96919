"""Logprobs on their way through the gateway: every token's come once, whatever fails."""

from collections.abc import Sequence
from typing import Any

import pytest

from quire import AsyncClient
from quire.types import Candidate, Delta, Sampling, TokenLogprobs
from quire.v1 import prefill_pb2
from services.runtime.errors import InvalidRequest

from .conftest import Call, asked
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


async def test_logprobs_of_prompt_and_answer_come_once(harness: Any) -> None:
    """Also if the decode worker is lost in the middle."""
    _, decode = harness.workers
    decode.pause_after = 4
    sampling = Sampling(0.0, seed=7, max_tokens=8, logprobs=NUM_TOP, prompt_logprobs=2)
    async with AsyncClient(await harness.listen()) as client:
        received: list[Delta] = []
        async for delta in client.generate(list(PROMPT), sampling):
            received.append(delta)
            if sum(len(one.token_ids) for one in received) == 4:
                decode.die()
                decode.go_on(pause_after=8)
    assert [token for delta in received for token in delta.token_ids] == TOKENS
    assert [each for delta in received for each in delta.logprobs] == OF_TOKENS
    assert [list(delta.prompt_logprobs) for delta in received if delta.prompt_logprobs] == [
        OF_PROMPT
    ]


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
