"""Draws of every kind over logits of every kind, for samplers that must draw the same tokens."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from services.engine.batch import Draw
from services.engine.sequences.penalty_state import PenaltyState
from services.protocol.ticket import SamplingParams
from tests.draws import sample

PLAIN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, max_tokens=1)

FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 1e-38},
    {"temperature": 0.3},
    {"temperature": 50.0},
    {"top_k": 1},
    {"top_k": 6},
    {"top_k": 10**9},
    {"top_p": 1e-9},
    {"top_p": 0.7},
    {"top_p": 0.99999},
    {"top_p": 1 - 2.0**-53},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"temperature": 1.7, "min_p": 0.01, "top_k": 50, "top_p": 0.9},
]
ADJUSTMENTS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.2},
    {"logit_bias": ((1, 3.5), (3, -100.0)), "bad_words": ((2,), (1, 4)), "min_tokens": 100},
    {"allowed_token_ids": (5, 0, 3), "bad_words": ((5,), (0,), (3,))},
]


def rows_of_logits(vocab_size: int) -> dict[str, Tensor]:
    """Rows of fp32 logits [vocab_size]."""
    generator = torch.Generator().manual_seed(vocab_size)
    normal = torch.randn(vocab_size, generator=generator)
    half = torch.where(torch.rand(vocab_size, generator=generator) < 0.5, float("-inf"), normal)
    huge = (normal * 1e38).clamp(-3e38, 3e38)
    broken = {name: normal.clone() for name in ("nan", "inf", "-inf")}
    for name, row in broken.items():
        row[vocab_size // 2] = float(name)
    return {
        "normal": 3 * normal,
        "flat": torch.zeros(vocab_size),
        "of few values": normal.round(),
        "half impossible": half,
        "one that is sure": torch.nn.functional.pad(torch.tensor([99.0]), (vocab_size - 1, 0)),
        "huge": huge,
        "tiny": normal * 1e-42,
        "close beside each other": 1000 + normal * 1e-4,
        "nothing possible": torch.full((vocab_size,), float("-inf")),
        **broken,
    }


@lru_cache
def cases(vocab_size: int) -> list[tuple[Tensor, list[Draw], list[int]]]:
    """Logits, draws and positions: one batch for each kind of adjustment."""
    return list(_cases(vocab_size))


@lru_cache
def wanted(vocab_size: int, kind: int) -> list[int]:
    """The sampler's draws for a batch of `cases`; -1: the logits are not finite."""
    return sample(*cases(vocab_size)[kind])


def _cases(vocab_size: int) -> Iterator[tuple[Tensor, list[Draw], list[int]]]:
    logits = torch.stack(list(rows_of_logits(vocab_size).values()))
    for adjustment in ADJUSTMENTS:
        kinds = list(itertools.product(range(len(logits)), FILTERS))
        draws = []
        for number, (_, filters) in enumerate(kinds):
            seed = (2**64 - 1 - number * 2**50) % 2**64
            bias = [pair for pair in adjustment.get("logit_bias", ()) if pair[0] < vocab_size]
            p = replace(PLAIN, seed=seed, **filters, **{**adjustment, "logit_bias": tuple(bias)})
            tokens = [number % 3, 1, 2, number % 5 % vocab_size, 1, 1]
            state = PenaltyState(p, tokens, 2, [4])
            draws.append(Draw(p, number % 4, state.adjustment() if adjustment else None))
        positions = [2**20 * (number % 7) + number for number in range(len(kinds))]
        yield logits[[row for row, _ in kinds]], draws, positions
