"""Draws of tokens: which ones the filters leave, how often each comes, and that a row's token
depends only on its own parameters and logits."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.engine.batch import Draw
from services.engine.sampling.philox import uniforms
from services.engine.sampling.sampling_batch import NOT_FINITE
from services.engine.sequences.penalty_state import PenaltyState
from services.protocol.ticket import SamplingParams
from tests.draws import filtered_weights, sample
from tests.examples import examples


def params(**changes: Any) -> SamplingParams:
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 7}
    return SamplingParams(**(neutral | {"max_tokens": 1} | changes))


def draw(**changes: Any) -> Draw:
    return Draw(params(**changes), sequence_index=0)


def kept(logits: Sequence[float], **changes: Any) -> list[int]:
    probs = filtered_weights(torch.tensor([logits]), [params(**changes)])
    return probs[0].nonzero().squeeze(1).tolist()


E = math.e
LN = [math.log(p) for p in (0.1, 0.4, 0.05, 0.3, 0.15)]


def test_temperature_zero_takes_the_largest_and_of_equals_the_first() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, -1.0], [5.0, 5.0, 5.0, 5.0]])
    assert sample(logits, [draw(temperature=0.0)] * 2, [0, 0]) == [1, 0]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 1}, [1]),
        ({"top_k": 3}, [1, 3, 4]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.01}, [1]),
        ({"top_p": 0.69}, [1, 3]),
        ({"top_p": 0.71}, [1, 3, 4]),
        ({"min_p": 0.3}, [1, 3, 4]),
        ({"min_p": 1.0}, [1]),
        # Of the two that top_k leaves, the first has 4/7 = 0.57: top_p counts what is left.
        ({"top_k": 2, "top_p": 0.55}, [1]),
        ({"top_k": 2, "top_p": 0.6}, [1, 3]),
        # Of the three that min_p leaves, the first two have 70/85 = 0.82.
        ({"min_p": 0.3, "top_p": 0.81}, [1, 3]),
        ({"min_p": 0.3, "top_p": 0.83}, [1, 3, 4]),
        # The temperature goes first: squared, the first has 0.16/0.285 = 0.56 and 3/4 as likely
        # becomes 9/16.
        ({"temperature": 0.5, "top_p": 0.55}, [1]),
        ({"temperature": 0.5, "min_p": 0.57}, [1]),
        ({"temperature": 0.5, "min_p": 0.55}, [1, 3]),
    ],
    ids=str,
)
def test_filters_in_their_order(changes: dict[str, Any], expected: list[int]) -> None:
    assert kept(LN, **changes) == expected


def test_tokens_that_tie_at_the_threshold_stay_together() -> None:
    assert kept([1.0, 2.0, 1.0, 1.0], top_k=2) == [0, 1, 2, 3]
    assert kept([1.0, 2.0, 1.0, 0.0], top_p=0.6) == [0, 1, 2]


def test_a_nucleus_that_reaches_top_p_exactly_is_complete() -> None:
    """Two tokens of equal weight are half of four."""
    assert kept([1.0, 0.0, 1.0, 0.0], top_p=E / (2 * E + 2) - 1e-6) == [0, 2]
    assert kept([0.0, 0.0, -99.0], top_p=0.5) == [0, 1]
    weights = filtered_weights(torch.tensor([LN]), [params()])[0]
    share = int(weights.max()) / int(weights.sum())
    assert kept(LN, top_p=share - 1e-12) == [1]
    assert kept(LN, top_p=share + 1e-12) == [1, 3]


def plain_filter(logits: list[float], p: SamplingParams, slack: float) -> set[int]:
    """The filters by their definition, in fp64, one token after the other; `slack` moves their
    limits by that share, outwards if positive."""
    probs = np.exp((np.array(logits) - max(logits)) / p.temperature)
    left = [i for i in range(len(logits)) if probs[i] >= p.min_p * probs.max() * (1 - slack)]
    left.sort(key=lambda i: -probs[i])
    left = left[: p.top_k or None]
    total, sum_before, nucleus = sum(probs[i] for i in left), 0.0, []
    for i in left:
        if sum_before < p.top_p * total * (1 + slack):
            nucleus.append(i)
        sum_before += probs[i]
    smallest = probs[nucleus[-1]] * (1 - slack)
    return {i for i in range(len(logits)) if probs[i] >= smallest}


@settings(deadline=None, max_examples=examples(200))
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([2, 5, 50, 1500]),
    spread=st.floats(0.1, 5.0),
    temperature=st.floats(0.2, 3.0),
    top_k=st.sampled_from([0, 1, 3, 40, 5000]),
    top_p=st.sampled_from([0.07, 0.5, 0.9, 0.993, 1.0]),
    min_p=st.sampled_from([0.0, 0.013, 0.2, 0.77]),
)
def test_filters_keep_what_a_plain_reference_keeps(
    seed: int, size: int, spread: float, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Within limits a hundred-thousandth tighter and looser: fp32 against fp64."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, generator=generator) * spread
    p = params(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    found = set(filtered_weights(logits[None], [p])[0].nonzero().squeeze(1).tolist())
    tight, loose = (plain_filter(logits.tolist(), p, slack) for slack in (-1e-5, 1e-5))
    assert tight <= found <= loose


def counts_of(tokens: Sequence[int]) -> np.ndarray[Any, Any]:
    return np.bincount(tokens, minlength=5)


def chi_square(observed: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    return float((np.square(observed - expected) / expected).sum())


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.7}, {"top_k": 3}, {"min_p": 0.2}])
def test_draws_follow_the_filtered_distribution(changes: dict[str, Any]) -> None:
    """20,000 draws of one request at successive positions. The limit is the 99.99th percentile of
    chi-square with 4 degrees of freedom; the seed is fixed, and so is the result."""
    num_draws = 20_000
    logits = torch.tensor([LN]).repeat(num_draws, 1)
    tokens = sample(logits, [draw(**changes)] * num_draws, range(num_draws))
    probs = filtered_weights(logits[:1], [params(**changes)])[0].double().numpy()
    counts = counts_of(tokens)
    possible = probs > 0
    assert counts[~possible].sum() == 0
    expected = probs[possible] / probs.sum() * num_draws
    assert chi_square(counts[possible], expected) < 23.5


@pytest.mark.parametrize("changes", [{}, {"temperature": 2.0}, {"top_p": 0.9}])
def test_draws_follow_the_distribution_over_many_chunks(changes: dict[str, Any]) -> None:
    """150 tokens are three chunks, the last one short; neighbours' logits differ a little. The
    limit is the 99.99th percentile with 149 degrees of freedom."""
    num_draws = 20_000
    row = torch.sin(torch.arange(150.0) * 0.7) - torch.arange(150.0) / 100
    logits = row.repeat(num_draws, 1)
    tokens = sample(logits, [draw(**changes)] * num_draws, range(num_draws))
    probs = filtered_weights(logits[:1], [params(**changes)])[0].double().numpy()
    counts = np.bincount(tokens, minlength=150)
    possible = probs > 0
    assert counts[~possible].sum() == 0
    expected = probs[possible] / probs.sum() * num_draws
    assert chi_square(counts[possible], expected) < 222


ADJUSTED: list[tuple[dict[str, Any], list[float]]] = [
    # Token 1 is twice in the output, token 3 once there and in the prompt, token 4 in the prompt.
    ({"frequency_penalty": 0.5}, [0.1, 0.4 * E**-1, 0.05, 0.3 * E**-0.5, 0.15]),
    ({"presence_penalty": -0.7}, [0.1, 0.4 * E**0.7, 0.05, 0.3 * E**0.7, 0.15]),
    ({"repetition_penalty": 2.0}, [0.1, 0.4**2, 0.05, 0.3**2, 0.15**2]),
    ({"logit_bias": ((0, 1.5), (3, -100.0))}, [0.1 * E**1.5, 0.4, 0.05, 0.0, 0.15]),
    ({"allowed_token_ids": (0, 4), "temperature": 0.5}, [0.1**2, 0.0, 0.0, 0.0, 0.15**2]),
    ({"bad_words": ((3, 1), (2,)), "min_tokens": 9}, [0.1, 0.4, 0.0, 0.3, 0.0]),
    ({"bad_words": ((1, 1),), "top_k": 2}, [0.0, 0.0, 0.0, 0.3, 0.15]),
]


@pytest.mark.parametrize(("changes", "shares"), ADJUSTED, ids=str)
def test_draws_follow_what_the_parameters_make_of_the_logits(
    changes: dict[str, Any], shares: list[float]
) -> None:
    """4,000 draws; token 4 ends a sequence. The limit is that of the test before."""
    num_draws = 4_000
    p = params(**changes)
    adjustment = PenaltyState(p, [3, 4, 3, 1, 1], 2, [4]).adjustment()
    logits = torch.tensor([LN]).repeat(num_draws, 1)
    tokens = sample(logits, [Draw(p, 0, adjustment)] * num_draws, range(num_draws))
    counts, expected = counts_of(tokens), np.array(shares) / sum(shares) * num_draws
    possible = expected > 1e-3
    assert counts[~possible].sum() == 0
    assert chi_square(counts[possible], expected[possible]) < 23.5


def test_seeds_and_sequences_draw_independently() -> None:
    """Draws at one position with 10,000 seeds, and of 10,000 sequences of one seed."""
    logits = torch.tensor([LN]).repeat(10_000, 1)
    of_seeds = [draw(seed=seed * 2**40) for seed in range(10_000)]
    of_sequences = [Draw(params(), index) for index in range(10_000)]
    expected = np.exp(LN) * 10_000
    for draws in (of_seeds, of_sequences):
        tokens = sample(logits, draws, [3] * 10_000)
        assert chi_square(counts_of(tokens), expected) < 23.5


def mixed_rows(vocab_size: int) -> tuple[Tensor, list[Draw], list[int]]:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn((64, vocab_size), generator=generator) * 3
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.3},
        {"top_k": 50},
        {"top_p": 0.9},
        {"top_p": 0.999, "temperature": 5.0},
        {"min_p": 0.05},
        {"top_k": vocab_size - 1, "top_p": 0.95},
        {"top_k": 7, "top_p": 0.5, "min_p": 0.1, "temperature": 0.6},
    ]
    draws = [Draw(params(seed=row, **kinds[row % 8]), row % 3) for row in range(64)]
    return logits, draws, [row * 37 for row in range(64)]


@pytest.mark.parametrize("vocab_size", [33, 5003])
def test_a_row_draws_the_same_alone_and_among_64(vocab_size: int) -> None:
    """Tokens and filtered probabilities, to the last bit."""
    logits, draws, positions = mixed_rows(vocab_size)
    together = sample(logits, draws, positions)
    sampled = [row for row in range(64) if draws[row].sampling.temperature > 0]
    probs = filtered_weights(logits[sampled], [draws[row].sampling for row in sampled])
    for row in range(64):
        alone = logits[row : row + 1].clone()
        assert sample(alone, [draws[row]], [positions[row]]) == [together[row]]
        if row in sampled:
            assert torch.equal(
                filtered_weights(alone, [draws[row].sampling])[0], probs[sampled.index(row)]
            )


def test_noise_in_the_logits_seldom_turns_a_draw() -> None:
    """Noise of 1e-5 on 2,000 draws from a flat vocabulary of 5,000 changes two of them at most."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn((1, 5000), generator=generator).repeat(2000, 1)
    noisy = logits + torch.randn((2000, 5000), generator=generator) * 1e-5
    draws = [draw()] * 2000
    turned = np.array(sample(logits, draws, range(2000))) != sample(noisy, draws, range(2000))
    assert turned.sum() <= 2


@pytest.mark.parametrize("temperature", [1e-38, 1e-6, 1e6])
def test_extreme_temperatures_stay_in_the_vocabulary(temperature: float) -> None:
    tokens = sample(torch.tensor([LN] * 50), [draw(temperature=temperature)] * 50, range(50))
    assert set(tokens) == {1} if temperature < 1 else set(tokens) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_whose_logits_are_not_finite_has_no_token_and_disturbs_no_other(bad: float) -> None:
    draws = [draw(temperature=0.0), draw(), draw(), draw(temperature=0.0)]
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(1))
    right = sample(logits, draws, range(4))
    logits[1, 2] = logits[3, 0] = bad
    faulty = sample(logits, draws, range(4))
    assert faulty == [right[0], NOT_FINITE, right[2], NOT_FINITE]


def test_philox_gives_the_published_numbers() -> None:
    """The first known answer of Random123's kat_vectors for philox4x64 with 10 rounds: key 0,
    counter 0."""
    outputs = [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]
    halves = [half for x in outputs for half in (x & 0xFFFFFFFF, x >> 32)]
    expected = [(half + 0.5) / 2**32 for half in halves]
    assert uniforms(0, 0, 0, 8).tolist() == pytest.approx(expected, rel=2e-7)


def test_philox_counts_in_its_lowest_word_and_is_keyed_by_the_rest() -> None:
    """Compared with a Philox in plain integers, at far arguments and an odd count."""
    seed, index, position = 2**64 - 2, 2**31, 131_071
    expected: list[float] = []
    for n in range(3):
        for output in philox4x64((n, 0, index, position), (seed, 0)):
            expected += [((output & 0xFFFFFFFF) + 0.5) / 2**32, ((output >> 32) + 0.5) / 2**32]
    assert uniforms(seed, index, position, 23).tolist() == pytest.approx(expected[:23], rel=2e-7)


def philox4x64(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, ...]:
    """Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", section 4.3."""
    word = 2**64
    (a, b, c, d), (k0, k1) = counter, key
    for _ in range(10):
        left, right = a * 0xD2E7470EE14C6C93, c * 0xCA5A826395121157
        a, b, c, d = (right // word ^ b ^ k0, right % word, left // word ^ d ^ k1, left % word)
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) % word, (k1 + 0xBB67AE8584CAA73B) % word
    return a, b, c, d


def test_uniforms_are_never_zero_and_never_one() -> None:
    numbers = uniforms(1, 2, 3, 1_000_000)
    assert 0.0 < numbers.min() < numbers.max() < 1.0
    assert abs(float(numbers.mean()) - 0.5) < 2e-3
