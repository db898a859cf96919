"""Sampling parameters through a whole deployment, over gRPC and HTTP: greedy tokens are those of
transformers' logits after each parameter is applied in the plain way."""

import math
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from tokenizers import pre_tokenizers

from quire.async_client import AsyncClient
from quire.types import Sampling

from .conftest import Oracle
from .deployment import Deployment
from .test_serving import prompt

EOS = (258, 256)
ASKED: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.5},
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 1.25},
    "bias": {"logit_bias": {300: 4.0, 301: 3.5, 302: -100.0}},
    "allowed": {"allowed_token_ids": tuple(range(260, 300))},
    "min_tokens": {"min_tokens": 24, "logit_bias": {258: 100.0}},
    "all": {
        "repetition_penalty": 1.25,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": {300: 2.0},
        "allowed_token_ids": tuple(range(259, 384)),
    },
}


def chosen(
    logits: Sequence[Sequence[float]], asked: dict[str, Any], tokens: Sequence[int], start: int
) -> list[int]:
    """The greedy token at each position from `start` on, given the tokens before."""
    found = []
    for position, row in enumerate(logits, start=start):
        output, adjusted = tokens[start:position], list(row)
        for token, bias in asked.get("logit_bias", {}).items():
            adjusted[token] += bias
        for token in set(tokens[:position]):
            factor = asked.get("repetition_penalty", 1.0)
            adjusted[token] *= 1 / factor if adjusted[token] > 0 else factor
        for token in set(output):
            adjusted[token] -= asked.get("frequency_penalty", 0.0) * output.count(token)
            adjusted[token] -= asked.get("presence_penalty", 0.0)
        allowed = asked.get("allowed_token_ids", range(384))
        ends = EOS if len(output) < asked.get("min_tokens", 0) else ()
        for token in range(384):
            if token not in allowed or token in ends:
                adjusted[token] = -math.inf
        found.append(adjusted.index(max(adjusted)))
    return found


@pytest.mark.parametrize("name", ASKED)
async def test_every_parameter_over_grpc_and_http(
    deployment: Deployment, client: AsyncClient, oracle: Oracle, name: str
) -> None:
    asked, tokens = ASKED[name], prompt(50, 30)
    options: dict[str, Any] = {
        "temperature": 0.0,
        "max_tokens": 32,
        "ignore_eos": name != "min_tokens",
    }
    completion = await client.complete(tokens, Sampling(**options, **asked))
    whole = [*tokens, *completion.token_ids]
    assert list(completion.token_ids) == chosen(
        oracle.logits(tokens, completion.token_ids), asked, whole, len(tokens)
    )
    body = {"prompt": tokens, "return_token_ids": True, **options, **asked}
    async with httpx.AsyncClient(base_url=deployment.http, trust_env=False) as http:
        response = await http.post("/v1/completions", json=body)
    assert response.json()["choices"][0]["token_ids"] == list(completion.token_ids)
    plain = await client.complete(tokens, Sampling(**options))
    assert plain.token_ids != completion.token_ids


async def test_min_tokens_holds_the_end_back(client: AsyncClient) -> None:
    """A bias makes every token an end-of-sequence token: the first one after `min_tokens` ends the
    answer."""
    end: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40, "logit_bias": {258: 100.0}}
    for min_tokens in (0, 1, 17):
        sampling = Sampling(min_tokens=min_tokens, **end)
        completion = await client.complete(prompt(51, 20), sampling)
        assert completion.finish_reason == "stop"
        assert len(completion.token_ids) == min_tokens + 1
        assert completion.token_ids[-1] == 258


async def test_bad_words_do_not_come(client: AsyncClient) -> None:
    """Only a few letters are allowed. Neither a letter that is a bad word occurs, nor one that ends
    a bad word of two letters."""
    asked: dict[str, Any] = {"temperature": 3.0, "seed": 1, "max_tokens": 90}
    asked["allowed_token_ids"] = _ids("abcd")
    free = await client.complete(prompt(52, 20), Sampling(**asked))
    assert set(free.text) == set("abcd")
    assert "bc" in free.text
    banned = await client.complete(prompt(52, 20), Sampling(bad_words=("d", "bc"), **asked))
    assert set(banned.text) == set("abc")
    assert "bc" not in banned.text


async def test_text_of_special_tokens_and_of_what_ended_it(client: AsyncClient) -> None:
    end: dict[str, Any] = {
        "temperature": 0.0,
        "logit_bias": {258: 100.0},
        "min_tokens": 2,
        "max_tokens": 9,
    }
    hidden = await client.complete(prompt(53, 20), Sampling(**end))
    shown = await client.complete(
        prompt(53, 20), Sampling(include_stop_str_in_output=True, skip_special_tokens=False, **end)
    )
    assert shown.token_ids == hidden.token_ids
    assert shown.text == hidden.text + "<|im_end|>"


def _ids(letters: str) -> tuple[int, ...]:
    """The token ids of single letters in the toy tokenizer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return tuple(alphabet.index(letter) for letter in letters)
