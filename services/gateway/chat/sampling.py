"""Checks a client's sampling parameters and resolves every default."""

import secrets
from collections.abc import Sequence
from typing import Any

from quire.sampling import NUMBERS
from services.gateway.api import RequestedSampling
from services.gateway.chat.bad_words import MAX_CHARS as MAX_BAD_WORD_CHARS
from services.gateway.chat.bad_words import token_sequences
from services.gateway.chat.beams import resolve_beam
from services.gateway.chat.prompts import check_token_ids
from services.gateway.checks import check_text, float32, require
from services.gateway.workers.models.catalog import Model
from services.model.config.model_config import GenerationDefaults
from services.protocol.ticket import MAX_BIAS, SamplingParams

MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_BIASES = 1024
MAX_ALLOWED_TOKEN_IDS = 16_384
MAX_BAD_WORDS = 1000
_NUM_SEEDS = 1 << 64


async def resolve_sampling(asked: RequestedSampling, model: Model) -> SamplingParams:
    """The checked parameters: the client's value, else the value of the model's generation_config,
    else the neutral value.

    `max_tokens` is provisional, because it depends on the prompt (`resolve_max_tokens`). Floats are
    rounded to the 32 bits of the wire before the checks, so that workers sample with the checked
    values.

    Raises InvalidRequest.
    """
    _check_stops(asked, model.config.vocab_size)
    _check_biases(asked, model.config.vocab_size)
    _check_allowed(asked, model.config.vocab_size)
    _check_bad_words(asked.bad_words)
    _check_counts(asked)
    check_combination(asked)
    beam = resolve_beam(asked)
    # A beam search of width 1 is greedy; the model's generation_config is about sampling.
    numbers: dict[str, Any] = {"temperature": 0.0}
    if beam is None:
        numbers = {name: _number(name, asked, model.config.generation) for name in NUMBERS}
        numbers["top_k"] = max(numbers["top_k"], 0)
    sampling = SamplingParams(
        **numbers,
        seed=secrets.randbits(64) if asked.seed is None else asked.seed % _NUM_SEEDS,
        max_tokens=asked.max_tokens or 1,
        stop_token_ids=asked.stop_token_ids,
        ignore_eos=asked.ignore_eos,
        logit_bias=tuple(
            (i, float32("logit_bias", bias)) for i, bias in sorted(asked.logit_bias.items())
        ),
        allowed_token_ids=asked.allowed_token_ids or (),
        bad_words=await token_sequences(asked.bad_words, model),
        structure=asked.structure,
        logprobs=asked.logprobs,
        n=asked.n,
        beam=beam,
    )
    _check_tokens_remain(sampling, model.config.eos_token_ids)
    if asked.structure is not None:
        await model.structures.check(asked.structure)
    return sampling


def _check_counts(asked: RequestedSampling) -> None:
    seed, most = asked.seed, asked.max_tokens
    require(most is None or most >= 1, f"max_tokens is {most}, not 1 or more", "max_tokens")
    require(
        seed is None or -(_NUM_SEEDS // 2) <= seed < _NUM_SEEDS,
        f"seed is {seed}, not in [-2**63, 2**64)",
        "seed",
    )


def _check_stops(asked: RequestedSampling, vocab_size: int) -> None:
    _check_limit("stop strings", len(asked.stop), MAX_STOP_STRINGS, "stop")
    _check_limit("stop_token_ids", len(asked.stop_token_ids), MAX_STOP_TOKEN_IDS, "stop_token_ids")
    for stop in asked.stop:
        require(bool(stop), "a stop string is empty", "stop")
        check_text("a stop string", stop, MAX_STOP_CHARS, param="stop")
    check_token_ids("stop_token_ids", asked.stop_token_ids, vocab_size)


def _check_biases(asked: RequestedSampling, vocab_size: int) -> None:
    _check_limit("tokens in logit_bias", len(asked.logit_bias), MAX_BIASES, "logit_bias")
    check_token_ids("logit_bias", tuple(asked.logit_bias), vocab_size)
    for token_id, bias in asked.logit_bias.items():
        require(
            -MAX_BIAS <= bias <= MAX_BIAS,
            f"logit_bias of {token_id} is {bias:g}, not in [-{MAX_BIAS:g}, {MAX_BIAS:g}]",
            "logit_bias",
        )


def _check_allowed(asked: RequestedSampling, vocab_size: int) -> None:
    if asked.allowed_token_ids is None:
        return
    require(
        bool(asked.allowed_token_ids),
        "allowed_token_ids is empty: no token could come",
        "allowed_token_ids",
    )
    _check_limit(
        "allowed_token_ids",
        len(asked.allowed_token_ids),
        MAX_ALLOWED_TOKEN_IDS,
        "allowed_token_ids",
    )
    check_token_ids("allowed_token_ids", asked.allowed_token_ids, vocab_size)


def _check_bad_words(words: Sequence[str]) -> None:
    _check_limit("bad_words", len(words), MAX_BAD_WORDS, "bad_words")
    _check_limit("characters in bad_words", sum(map(len, words)), MAX_BAD_WORD_CHARS, "bad_words")
    for word in words:
        require(bool(word.strip()), "a bad word is empty", "bad_words")
        check_text("a bad word", word, MAX_BAD_WORD_CHARS, param="bad_words")


def _check_tokens_remain(sampling: SamplingParams, eos_token_ids: Sequence[int]) -> None:
    """Raises InvalidRequest if bad words and `min_tokens` ban every allowed token at the start.

    Bad words of several tokens are left out: they ban a token only after others, which the sampler
    decides step by step.
    """
    allowed = set(sampling.allowed_token_ids)
    if not allowed:
        return
    left = allowed - {word[0] for word in sampling.bad_words if len(word) == 1}
    require(bool(left), f"all {len(allowed)} allowed_token_ids are bad_words", "bad_words")
    if sampling.min_tokens:
        left -= {*eos_token_ids, *sampling.stop_token_ids}
        require(
            bool(left),
            f"min_tokens is {sampling.min_tokens}, but all {len(allowed)} allowed_token_ids are "
            "bad_words or end the generation",
            "min_tokens",
        )


def _check_limit(name: str, number: int, most: int, param: str) -> None:
    require(number <= most, f"{number} {name}, at most {most}", param)


def _number(name: str, asked: RequestedSampling, defaults: GenerationDefaults) -> float:
    """The checked value of a parameter in `NUMBERS`. Not all have a default of the model."""
    number = NUMBERS[name]
    given = getattr(asked, name), getattr(defaults, name, None)
    value = next(value for value in (*given, number.neutral) if value is not None)
    if isinstance(number.neutral, float):
        value = float32(name, value)
    shown = f"{value:g}" if isinstance(value, float) else value
    require(number.accepts(value), f"{name} is {shown}, not {number.bounds}", name)
    return value


def check_combination(asked: RequestedSampling) -> None:
    """Raises InvalidRequest if a parameter cannot be combined with structured output."""
    if asked.structure is None:
        return
    for name, is_given in (
        ("use_beam_search", asked.beam is not None),
        ("allowed_token_ids", asked.allowed_token_ids is not None),
        ("ignore_eos", asked.ignore_eos),
    ):
        require(not is_given, f"structured output cannot be combined with {name}", name)
