"""Native draws equal those of `services.engine.sampling.sampler`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvops import _native
from services.engine.batch import Draw
from services.engine.models.fused import native_draws
from services.engine.sequences.penalty_state import PenaltyState
from services.model.structured.mask import Mask
from services.protocol.ticket import SamplingParams
from tests.draws import batch_of, sample

from .draw_cases import ADJUSTMENTS as ADJUSTMENTS_OF_CASES
from .draw_cases import cases, wanted

PLAIN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, max_tokens=1)
ISAS = pytest.mark.parametrize("isa", _native.usable_kernels())
FILTERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 20},
    "top_k of 1": {"top_k": 1},
    "top_k beyond the vocabulary": {"top_k": 10**6},
    "top_p": {"top_p": 0.8},
    "top_p of almost all": {"top_p": 0.9999, "temperature": 3.0},
    "top_p of almost nothing": {"top_p": 1e-6},
    "min_p": {"min_p": 0.1},
    "all": {"temperature": 1.7, "min_p": 0.01, "top_k": 100, "top_p": 0.9},
}


def native(
    isa: str, logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> list[int]:
    return of_draws(isa, logits, [Draw(p, row % 3) for row, p in enumerate(params)], positions)


def of_draws(
    isa: str,
    logits: Tensor,
    draws: Sequence[Draw],
    positions: Sequence[int],
    masks: Sequence[Mask | None] = (),
) -> list[int]:
    tokens = torch.full((len(draws),), -7)
    before = logits.clone()
    native = native_draws(batch_of(draws, positions), masks or [None] * len(draws))
    _native.sample(isa, logits, native, tokens)
    # What a draw changes is changed back.
    assert torch.equal(logits.nan_to_num(7.5), before.nan_to_num(7.5))
    found: list[int] = tokens.tolist()
    return found


@ISAS
@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("vocab_size", [1, 7, 1000, 20_011])
def test_draws_are_those_of_the_sampler(isa: str, name: str, vocab_size: int) -> None:
    """40 draws with different seeds, sequences and positions; the last bit of a probability changes
    about one draw in a million."""
    logits = 3 * torch.randn(40, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    params = [replace(PLAIN, seed=2**64 - 1 - row, **FILTERS[name]) for row in range(40)]
    draws = [Draw(p, row % 3) for row, p in enumerate(params)]
    positions = [17 * row for row in range(40)]
    assert native(isa, logits, params, positions) == sample(logits, draws, positions)


@ISAS
@pytest.mark.parametrize("kind", range(len(ADJUSTMENTS_OF_CASES)))
@pytest.mark.parametrize("vocab_size", [6, 300, 4200])
def test_draws_of_every_kind_are_those_of_the_sampler(isa: str, vocab_size: int, kind: int) -> None:
    assert of_draws(isa, *cases(vocab_size)[kind]) == wanted(vocab_size, kind)


@ISAS
def test_logits_that_are_not_finite_are_reported(isa: str) -> None:
    logits = torch.zeros(4, 33)
    logits[0, 32] = float("nan")
    logits[1, 3] = float("nan")
    logits[2, 16] = float("inf")
    logits[3, 5:] = float("-inf")  # Not harmful: never drawn.
    tokens = native(isa, logits, [PLAIN] * 4, range(4))
    assert tokens[:3] == [-1, -1, -1]
    assert 0 <= tokens[3] < 5


ADJUSTMENTS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.7},
    "frequency and presence": {"frequency_penalty": 0.9, "presence_penalty": -0.6},
    "bias": {"logit_bias": tuple((token, 4.0 - token) for token in range(0, 9, 2))},
    "allowed": {"allowed_token_ids": (6, 0, 3, 5)},
    "banned": {"bad_words": ((0,), (1, 2), (4, 3)), "min_tokens": 100},
    "nothing is left": {"allowed_token_ids": (6, 5), "bad_words": ((6,), (5,), (6,))},
    "all": {
        "repetition_penalty": 0.8,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.5,
        "logit_bias": ((1, 3.5), (6, -100.0)),
        "allowed_token_ids": (0, 1, 2, 3, 6),
        "bad_words": ((1, 1), (0,)),
        "min_tokens": 100,
    },
}


@ISAS
@pytest.mark.parametrize("name", ADJUSTMENTS)
@pytest.mark.parametrize("filters", ["greedy", "temperature", "top_p", "all"])
@pytest.mark.parametrize("vocab_size", [7, 130, 20_011])
def test_adjusted_draws_are_those_of_the_sampler(
    isa: str, name: str, filters: str, vocab_size: int
) -> None:
    """40 sequences of likely tokens that repeat; some end with token 0 or 4."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 3 * torch.randn(40, vocab_size, generator=generator)
    logits[:, :7] += 8
    kind = {"temperature": 0.0} if filters == "greedy" else FILTERS[filters]
    draws = []
    for row in range(40):
        logit_bias = [pair for pair in ADJUSTMENTS[name].get("logit_bias", ()) if pair[0] < 7]
        p = replace(PLAIN, seed=row, **kind, **{**ADJUSTMENTS[name], "logit_bias": logit_bias})
        tokens = torch.randint(0, 4, (60,), generator=generator).tolist()
        tokens[-1] = row % 7
        draws.append(Draw(p, 0, PenaltyState(p, tokens, row, [0, 4]).adjustment()))
    positions = list(range(40))
    found = of_draws(isa, logits, draws, positions)
    assert found == sample(logits, draws, positions)
    assert found != of_draws(isa, logits, [replace(d, adjustment=None) for d in draws], positions)


@ISAS
@pytest.mark.parametrize("name", ["nothing else", *ADJUSTMENTS])
@pytest.mark.parametrize("filters", ["greedy", "top_p", "all"])
@pytest.mark.parametrize("vocab_size", [7, 130, 20_011])
def test_masked_draws_are_those_of_the_sampler(
    isa: str, name: str, filters: str, vocab_size: int
) -> None:
    """Masks of a few tokens, of many, and of whole words of bits; bans that would leave no token
    are ignored."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 3 * torch.randn(40, vocab_size, generator=generator)
    kind = {"temperature": 0.0} if filters == "greedy" else FILTERS[filters]
    draws, masks, packed = [], [], []
    for row in range(40):
        share = (0.0, 0.02, 0.5, 1.0)[row % 4]
        may_come = torch.rand(-(-vocab_size // 32) * 32, generator=generator) < share
        may_come[row % 7] = True
        may_come[64:128] = row % 8 == 1
        bits = np.packbits(may_come.numpy(), bitorder="little").view(np.int32)
        asked = ADJUSTMENTS.get(name, {})
        logit_bias = [pair for pair in asked.get("logit_bias", ()) if pair[0] < 7]
        p = replace(PLAIN, seed=row, **kind, **{**asked, "logit_bias": logit_bias})
        adjustment = PenaltyState(p, [1, 2, 0, 1, row % 5], 1, [0, 4]).adjustment()
        draws.append(Draw(p, 0, adjustment))
        masks.append(may_come)
        packed.append(bits)
    found = of_draws(isa, logits, draws, range(40), packed)
    assert found == sample(logits, draws, range(40), packed)
    assert all(token == -1 or masks[row][token] for row, token in enumerate(found))
    if "allowed_token_ids" not in ADJUSTMENTS.get(name, {}):
        assert -1 not in found


@ISAS
def test_a_mask_shorter_than_the_vocabulary_is_refused(isa: str) -> None:
    with pytest.raises(ValueError, match="shorter than the vocabulary"):
        of_draws(isa, torch.zeros(1, 65), [Draw(PLAIN, 0)], [0], [np.zeros(2, np.int32)])


@ISAS
def test_non_finite_logits_are_reported_whatever_is_allowed(isa: str) -> None:
    logits = torch.zeros(2, 70)
    logits[0, 69] = float("nan")
    p = replace(PLAIN, allowed_token_ids=(3,))
    draws = [Draw(p, 0, PenaltyState(p, [1], 1, []).adjustment())] * 2
    assert of_draws(isa, logits, draws, [0, 0]) == [-1, 3]
    assert sample(logits, draws, [0, 0]) == [-1, 3]


@ISAS
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 6.0, 40.0])
@pytest.mark.parametrize("filters", ["temperature", "top_p", "min_p", "top_k"])
def test_draws_from_a_whole_vocabulary_are_those_of_the_sampler(
    isa: str, spread: float, filters: str
) -> None:
    """151,936 tokens, from a uniform distribution to one that is almost certain; some tokens are
    impossible."""
    generator = torch.Generator().manual_seed(4)
    logits = spread * torch.randn(6, 151_936, generator=generator)
    logits[:, ::97] = float("-inf")
    params = [replace(PLAIN, seed=row * 2**60 + 1, **FILTERS[filters]) for row in range(6)]
    draws = [Draw(p, row) for row, p in enumerate(params)]
    assert of_draws(isa, logits, draws, range(6)) == sample(logits, draws, range(6))


@ISAS
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 6.0])
@pytest.mark.parametrize("top_p", [1e-9, 0.2, 0.9, 0.9999, 1 - 1e-9])
def test_a_nucleus_of_any_shape_is_the_samplers(isa: str, spread: float, top_p: float) -> None:
    """From almost all tokens to a few, and with equal probabilities."""
    generator = torch.Generator().manual_seed(1)
    logits = spread * torch.randn(60, 3001, generator=generator)
    params = [replace(PLAIN, top_p=top_p, seed=row) for row in range(60)]
    draws = [Draw(p, 0) for p in params]
    assert of_draws(isa, logits, draws, range(60)) == sample(logits, draws, range(60))


def test_a_temperature_below_0_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature"):
        native("portable", torch.zeros(1, 5), [replace(PLAIN, temperature=-1.0)], [0])
