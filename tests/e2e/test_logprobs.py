"""Logprobs of a whole deployment equal those of transformers."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.async_client import AsyncClient
from quire.types import Completion, Sampling, TokenLogprobs

from .conftest import Oracle
from .quiet import quiet
from .test_serving import prompt

NUM_TOP = 5


def exact(oracle: Oracle, tokens: Sequence[int]) -> Tensor:
    """Log-probabilities [len(tokens), vocab_size] after each token."""
    with torch.inference_mode():
        logits: Tensor = oracle._model(torch.tensor([list(tokens)])).logits[0]
    return logits.double().log_softmax(dim=-1)


def assert_is(found: TokenLogprobs, logprobs: Tensor, token_id: int) -> None:
    chosen = found.chosen
    assert chosen.token_id == token_id
    assert chosen.logprob == pytest.approx(logprobs[token_id].item(), abs=1e-4)
    nearly = int((logprobs > logprobs[token_id] + 1e-4).sum())
    assert nearly < chosen.rank <= int((logprobs > logprobs[token_id] - 1e-4).sum()) + 1
    assert [each.rank for each in found.top] == list(range(1, NUM_TOP + 1))
    values = logprobs.topk(NUM_TOP).values.tolist()
    assert [each.logprob for each in found.top] == pytest.approx(values, abs=1e-4)
    there = [logprobs[each.token_id].item() for each in found.top]
    assert [each.logprob for each in found.top] == pytest.approx(there, abs=1e-4)


def asking(num_tokens: int, **fields: Any) -> Sampling:
    return Sampling(
        **{"temperature": 0.0, **fields},
        max_tokens=num_tokens,
        ignore_eos=True,
        logprobs=NUM_TOP,
        prompt_logprobs=NUM_TOP,
    )


def assert_right(oracle: Oracle, tokens: list[int], completion: Completion) -> None:
    everything = [*tokens, *completion.token_ids]
    logprobs = exact(oracle, everything)
    told = [*completion.prompt_logprobs, *completion.logprobs]
    assert len(told) == len(everything) - 1
    for position, found in enumerate(told, 1):
        assert_is(found, logprobs[position - 1], everything[position])


@pytest.mark.parametrize("length", [1, 2, 16, 17, 700])
async def test_logprobs_equal_transformers(
    client: AsyncClient, oracle: Oracle, length: int
) -> None:
    """The logprobs of the whole prompt and of every token, cold and then bit by bit the same with a
    cached prompt."""
    tokens = prompt(900 + length, length)
    first = await client.complete(tokens, asking(12))
    assert_right(oracle, tokens, first)
    again = await client.complete(tokens, asking(12))
    assert again.usage.num_cached_tokens == 0  # adopted, but computed
    assert (again.prompt_logprobs, again.logprobs) == (first.prompt_logprobs, first.logprobs)
    await quiet(client)


async def test_logprobs_are_of_raw_logits(client: AsyncClient, oracle: Oracle) -> None:
    """Logprobs are taken before all parameters that change the draw."""
    tokens = prompt(970, 20)
    (likeliest,) = (await client.complete(tokens, asking(1))).token_ids
    sampling = asking(
        20, repetition_penalty=1.7, frequency_penalty=1.5, logit_bias={likeliest: -100.0}
    )
    changed = await client.complete(tokens, sampling)
    assert changed.token_ids[0] != likeliest
    assert changed.logprobs[0].top[0].token_id == likeliest
    assert_right(oracle, tokens, changed)
    await quiet(client)


async def test_logprobs_of_several_sequences_of_one_request(
    client: AsyncClient, oracle: Oracle
) -> None:
    """Each sequence has its own logprobs; those of the first token come from the same logits. The
    prompt's come once."""
    tokens = prompt(975, 37)
    sampling = asking(20, temperature=1.5, seed=3, n=4)
    first = await client.complete(tokens, sampling)
    assert len({choice.token_ids for choice in first.choices}) == 4
    of_prompt = exact(oracle, tokens)
    for position, found in enumerate(first.prompt_logprobs, 1):
        assert_is(found, of_prompt[position - 1], tokens[position])
    assert len(first.prompt_logprobs) == len(tokens) - 1
    for choice in first.choices:
        everything = [*tokens, *choice.token_ids]
        logprobs = exact(oracle, everything)
        assert len(choice.logprobs) == len(choice.token_ids)
        for position, found in enumerate(choice.logprobs, len(tokens)):
            assert_is(found, logprobs[position - 1], everything[position])
    again = await client.complete(tokens, sampling)
    assert again.prompt_logprobs == first.prompt_logprobs
    assert again.choices == first.choices
    await quiet(client)
