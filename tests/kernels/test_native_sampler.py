"""Native draws against `services.engine.sampler`, which says what they are, and against what each
filter leaves."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvops import _native
from services.common.ticket import SamplingParams
from services.engine.batch import Draw
from services.engine.sampler import filtered_probs, sample

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
    tokens = torch.full((len(params),), -7)
    draws = [
        (p.temperature, p.min_p, p.top_k, p.top_p, p.seed, row % 3, position)
        for row, (p, position) in enumerate(zip(params, positions, strict=True))
    ]
    _native.sample(isa, logits, draws, tokens)
    found: list[int] = tokens.tolist()
    return found


@ISAS
@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("vocab_size", [1, 7, 1000, 20_011])
def test_draws_are_those_of_the_sampler(isa: str, name: str, vocab_size: int) -> None:
    """40 draws with seeds, sequences and positions of their own; a last bit of a probability turns
    about one in a million."""
    logits = 3 * torch.randn(40, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    params = [replace(PLAIN, seed=2**64 - 1 - row, **FILTERS[name]) for row in range(40)]
    draws = [Draw(p, row % 3) for row, p in enumerate(params)]
    positions = [17 * row for row in range(40)]
    assert native(isa, logits, params, positions) == sample(logits, draws, positions)


@ISAS
@pytest.mark.parametrize("name", FILTERS)
def test_nothing_is_drawn_that_the_filters_take_out(isa: str, name: str) -> None:
    """Logits of few values, so that many tie at every threshold."""
    row = torch.randint(0, 12, (1, 300), generator=torch.Generator().manual_seed(3)).float()
    params = [replace(PLAIN, seed=seed, **FILTERS[name]) for seed in range(400)]
    allowed = set(filtered_probs(row, [params[0]])[0].nonzero().squeeze(1).tolist())
    drawn = set(native(isa, row.expand(400, -1).contiguous(), params, [5] * 400))
    assert drawn <= allowed
    assert len(drawn) > len(allowed) / 3 or len(drawn) > 50


@ISAS
def test_logits_that_are_not_finite_are_told(isa: str) -> None:
    logits = torch.zeros(4, 33)
    logits[0, 32] = float("nan")
    logits[1, 3] = float("nan")
    logits[2, 16] = float("inf")
    logits[3, 5:] = float("-inf")  # Not harmful: never drawn.
    tokens = native(isa, logits, [PLAIN] * 4, range(4))
    assert tokens[:3] == [-1, -1, -1]
    assert 0 <= tokens[3] < 5


def test_a_draw_without_a_temperature_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature"):
        native("portable", torch.zeros(1, 5), [replace(PLAIN, temperature=0.0)], [0])
