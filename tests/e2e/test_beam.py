"""Beam search through real processes finds the hypotheses of transformers."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from quire.async_client import AsyncClient
from quire.types import Beam, Delta, Sampling

from .deployment import Deployment
from .quiet import quiet

LIMIT_S = 90.0


@pytest.fixture(scope="module")
def deployment(roomy: Deployment) -> Deployment:
    return roomy


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


def prompt_of(seed: int, length: int = 40) -> list[int]:
    return [random.Random(seed).randrange(259, 384) for _ in range(length)]


Found = list[tuple[list[int], float | None]]


def by_transformers(
    model: Any, prompt: Sequence[int], sampling: Sampling, num_returned: int
) -> Found:
    """The hypotheses of transformers as (tokens, score), best first."""
    beam = sampling.beam
    assert beam is not None
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            num_beams=beam.width,
            num_return_sequences=num_returned,
            length_penalty=1.0 if beam.length_penalty is None else beam.length_penalty,
            early_stopping=beam.early_stopping,
            max_new_tokens=sampling.max_tokens,
            eos_token_id=list(sampling.stop_token_ids) or None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    lengths = (found.beam_indices >= 0).sum(dim=1).tolist()
    rows = zip(found.sequences.tolist(), lengths, found.sequences_scores.tolist(), strict=True)
    return [(row[len(prompt) :][:length], score) for row, length, score in rows]


async def search(client: AsyncClient, prompt: Sequence[int], sampling: Sampling) -> Found:
    deltas = [delta async for delta in client.generate(prompt, sampling, timeout_s=LIMIT_S)]
    return found_in(deltas)


def found_in(deltas: Sequence[Delta]) -> Found:
    found: dict[int, tuple[list[int], float | None]] = {}
    for delta in deltas:
        tokens, _ = found.setdefault(delta.index, ([], None))
        found[delta.index] = (tokens + list(delta.token_ids), delta.score)
    return [found[index] for index in sorted(found)]


def check(found: Found, expected: Found) -> None:
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert [score for _, score in found] == pytest.approx([s for _, s in expected], rel=1e-5)


@pytest.mark.parametrize(
    ("width", "n", "penalty", "early_stopping"),
    [(4, 4, None, False), (2, 1, 0.0, True), (16, 5, 2.0, "never"), (3, 3, -1.0, False)],
)
async def test_beam_search_equals_transformers(
    client: AsyncClient, model: Any, width: int, n: int, penalty: float | None, early_stopping: Any
) -> None:
    """The first search has no stop token; the second has stop tokens that its beams draw."""
    prompt, beam = prompt_of(width), Beam(width, penalty, early_stopping)
    free = Sampling(beam=beam, n=n, max_tokens=24, ignore_eos=True)
    expected = by_transformers(model, prompt, free, n)
    check(await search(client, prompt, free), expected)
    stops = tuple({tokens[9] for tokens, _ in expected})[:2]
    ending = Sampling(beam=beam, n=n, max_tokens=24, ignore_eos=True, stop_token_ids=stops)
    expected = by_transformers(model, prompt, ending, n)
    check(await search(client, prompt, ending), expected)
    await quiet(client)
