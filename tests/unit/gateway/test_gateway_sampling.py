"""Sampling parameters with their defaults resolved, and bad words as tokens.
tests/integration/gateway tests the refusals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from bench.make_checkpoint import CheckpointSpec, make_checkpoint
from quire.messages import Request, generate_request
from quire.types import Beam, Sampling
from services.gateway.api import RequestedSampling
from services.gateway.chat.sampling import resolve_sampling
from services.gateway.workers.models.catalog import Model, load_model
from services.model.config.model_config import GenerationDefaults
from services.model.text.tokenizer import Tokenizer
from services.runtime.errors import InvalidRequest

NAN, INFINITY = float("nan"), float("inf")
WORDS = ["a", "b", "Ġ", "Ġa", "ab", "Ġb", "bb"]
"""In a toy vocabulary `ab` is a token and ` ab` two; `a` and ` a` are one each."""
IDS = {word: token_id for token_id, word in enumerate(WORDS)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(str(make_checkpoint(tmp_path_factory.mktemp("tiny"), CheckpointSpec())))


@pytest.fixture
def model(checkpoint: Model) -> Model:
    merges = [("Ġ", "a"), ("a", "b"), ("Ġ", "b"), ("b", "b")]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=IDS, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return replace(checkpoint, tokenizer=Tokenizer(tokenizer, {}))


async def resolved(model: Model, **asked: Any) -> Any:
    return await resolve_sampling(RequestedSampling(**asked), model)


async def spelled(model: Model, *words: str) -> list[list[str]]:
    sampling = await resolved(model, bad_words=words)
    return [[WORDS[token_id] for token_id in word] for word in sampling.bad_words]


@pytest.mark.parametrize(
    ("words", "banned"),
    [
        (["a"], [["a"], ["Ġa"]]),
        ([" a"], [["a"], ["Ġa"]]),  # the same word
        (["bb"], [["bb"]]),
        (["aba"], [["ab", "a"]]),
        (["b", "a", "b"], [["b"], ["Ġb"], ["a"], ["Ġa"]]),
    ],
)
async def test_a_bad_word_is_banned_with_and_without_a_space_before(
    model: Model, words: list[str], banned: list[list[str]]
) -> None:
    """` bb` is `Ġb`, `b`: as in vLLM, only a spelling of the same number of tokens counts."""
    assert await spelled(model, *words) == banned


async def test_many_bad_words_are_tokenized_beside_the_loop(model: Model) -> None:
    words = ["a" + "b" * n for n in range(1, 40)]
    one_by_one = [spelling for word in words for spelling in await spelled(model, word)]
    assert await spelled(model, *words) == one_by_one


async def test_the_models_own_penalty_is_the_default(model: Model) -> None:
    assert (await resolved(model)).repetition_penalty == 1.0
    own = replace(model.config, generation=GenerationDefaults(repetition_penalty=1.25))
    model = replace(model, config=own)
    assert (await resolved(model)).repetition_penalty == 1.25
    assert (await resolved(model, repetition_penalty=1.5)).repetition_penalty == 1.5
    search = await resolved(model, beam=Beam(2))
    assert (search.repetition_penalty, search.temperature) == (1.0, 0.0)


async def test_checked_parameters_are_sent_unchanged(model: Model) -> None:
    """Floats have 32 bits."""
    sampling = await resolved(model, presence_penalty=0.1, logit_bias={3: 0.1})
    assert sampling.presence_penalty == sampling.logit_bias[0][1] == 0.10000000149011612


async def test_allowed_tokens_that_are_all_bad_words_are_refused(model: Model) -> None:
    with pytest.raises(InvalidRequest, match="all 2 allowed_token_ids are bad_words"):
        await resolved(model, allowed_token_ids=(IDS["a"], IDS["Ġa"]), bad_words=("a",))
    assert await resolved(model, allowed_token_ids=(IDS["a"], IDS["b"]), bad_words=("a",))


@pytest.mark.parametrize(("asked", "seed"), [(-1, 2**64 - 1), (-(2**63), 2**63), (7, 7)])
async def test_negative_seed_is_the_seed_with_the_same_64_bits(
    model: Model, asked: int, seed: int
) -> None:
    assert (await resolved(model, seed=asked)).seed == seed
    message = generate_request(Request("x", Sampling(seed=asked)))
    assert message.sampling.seed == seed


async def test_an_absent_seed_is_drawn(model: Model) -> None:
    assert (await resolved(model)).seed != (await resolved(model)).seed


def test_a_checkpoint_says_its_penalty(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, CheckpointSpec())
    (directory / "generation_config.json").write_text('{"repetition_penalty": 1.05}')
    assert load_model(str(directory)).config.generation.repetition_penalty == 1.05


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": NAN}, "temperature is nan"),
        ({"temperature": INFINITY}, "temperature is inf"),
        ({"temperature": 1e300}, "too large"),
        ({"top_k": -2}, "top_k is -2"),
        ({"top_p": 0.0}, "top_p is 0"),
        ({"top_p": 1e-60}, "top_p is 0"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_p": NAN}, "top_p is nan"),
        ({"min_p": -0.01}, "min_p is -0.01"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"seed": -(1 << 63) - 1}, "seed is -9223372036854775809"),
        ({"seed": 1 << 64}, "seed is 18446744073709551616"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": -5}, "max_tokens is -5"),
        ({"stop": ("",)}, "a stop string is empty"),
        ({"stop": ("x",) * 65}, "65 stop strings"),
        ({"stop": ("x" * 1025,)}, "1025 characters"),
        ({"stop": ("\ud800",)}, "not valid Unicode"),
        ({"stop_token_ids": (384,)}, "384 is not in the vocabulary of 384"),
        ({"stop_token_ids": (-1,)}, "-1 is not in the vocabulary"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0, not above 0"),
        ({"repetition_penalty": -1.0}, "repetition_penalty is -1"),
        ({"repetition_penalty": INFINITY}, "repetition_penalty is inf"),
        ({"presence_penalty": 2.1}, "presence_penalty is 2.1, not in [-2, 2]"),
        ({"frequency_penalty": -2.1}, "frequency_penalty is -2.1, not in [-2, 2]"),
        ({"frequency_penalty": NAN}, "frequency_penalty is nan"),
        ({"logit_bias": {7: 100.5}}, "logit_bias of 7 is 100.5, not in [-100, 100]"),
        ({"logit_bias": {7: NAN}}, "logit_bias of 7 is nan"),
        ({"logit_bias": {384: 1.0}}, "logit_bias: 384 is not in the vocabulary of 384"),
        ({"logit_bias": dict.fromkeys(range(1025), 1)}, "1025 tokens in logit_bias, at most 1024"),
        ({"allowed_token_ids": ()}, "allowed_token_ids is empty"),
        ({"allowed_token_ids": (384,)}, "allowed_token_ids: 384 is not in the vocabulary"),
        ({"allowed_token_ids": (1,) * 16385}, "16385 allowed_token_ids, at most 16384"),
        ({"bad_words": ("x",) * 1001}, "1001 bad_words, at most 1000"),
        ({"bad_words": ("x" * 16385,)}, "16385 characters in bad_words, at most 16384"),
        ({"bad_words": (" ",)}, "a bad word is empty"),
        ({"bad_words": ("\ud800",)}, "not valid Unicode"),
        ({"min_tokens": -1}, "min_tokens is -1, not 0 or more"),
        (
            {"min_tokens": 1, "allowed_token_ids": (7, 8), "stop_token_ids": (7, 8)},
            "min_tokens is 1, but all 2 allowed_token_ids are bad_words or end the generation",
        ),
    ],
)
async def test_a_refusal_names_the_parameter_at_fault(
    model: Model, asked: dict[str, Any], text: str
) -> None:
    """The first one of each row."""
    with pytest.raises(InvalidRequest) as refused:
        await resolved(model, **asked)
    assert text in str(refused.value)
    assert refused.value.param == next(iter(asked))
