"""Greedy tokens equal those of transformers, in fp32, for any chunks, cached prefixes, pages and
batches.

A token must be the oracle's, and its logits must equal the oracle's within 1e-4 (they spread over
about 2), which also excludes equality by luck.
"""

from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch

from bench.make_checkpoint import make_checkpoint

from .models_oracle import (
    NUM_NEW_TOKENS,
    SPECS,
    Oracle,
    RecordingRunner,
    Trial,
    pairwise,
    random_prompt,
)

LENGTHS = (1, 17, 256, 1100)
SAMPLE_LENGTHS = (1, 17, 256, 530)
BATCHES = (1, 5, 64)
SAMPLE_BATCHES = (1, 5, 16)
CHUNKS = (7, 64, 512, 4096)  # 4,096 holds every prompt whole
BLOCK_SIZES = (1, 16, 256)
CACHED = ("nothing", "a prefix", "all of it")
BACKENDS = ("cpu", "reference")

Oracles = Callable[[str], tuple[Path, Oracle]]


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> Oracles:
    """Checkpoint directory and oracle by the name of a spec."""

    @cache
    def of(name: str) -> tuple[Path, Oracle]:
        directory = make_checkpoint(tmp_path_factory.mktemp(name), SPECS[name])
        return directory, Oracle(directory)

    return of


def prompts_of(length: int, batch: int) -> list[tuple[int, ...]]:
    """A prompt of `length`; the others have different lengths of at most 100."""
    short = [random_prompt(1 + i * 37 % 100, seed=i) for i in range(1, batch)]
    return [random_prompt(length, seed=0), *short]


def donor_prompt(prompt: tuple[int, ...], cached: str) -> tuple[int, ...]:
    """A prompt whose blocks contain the wanted cached part of `prompt`."""
    if cached == "all of it":
        return prompt
    begin = len(prompt) * 2 // 3
    return (*prompt[:begin], *((token + 1) % 260 for token in prompt[begin:]))


def check(
    of: tuple[Path, Oracle],
    length: int,
    batch: int,
    chunk: int,
    block_size: int,
    cached: str,
    backend: str,
) -> None:
    directory, oracle = of
    prompts = prompts_of(length, batch)
    num_blocks = sum(2 * (-(-(len(p) + NUM_NEW_TOKENS) // block_size)) for p in prompts)
    recording = RecordingRunner(directory, block_size, num_blocks, backend)
    donors: list[Trial | None] = [None] * batch
    if cached != "nothing":
        placed = [recording.place(donor_prompt(prompt, cached)) for prompt in prompts]
        recording.decode_all(placed, chunk)
        donors = [*placed]
    suspects = [recording.place(p, donor) for p, donor in zip(prompts, donors, strict=True)]
    adopted = [t.block_table[: t.num_cached // block_size] for t in suspects]
    before = [recording.arena[blocks].clone() for blocks in adopted]
    recording.decode_all(suspects, chunk, late=1)
    for trial, blocks, content in zip(suspects, adopted, before, strict=True):
        answer = oracle.answer(trial.prompt)
        assert trial.new_tokens == answer.token_ids
        torch.testing.assert_close(torch.stack(trial.logits), answer.logits, rtol=0, atol=1e-4)
        assert torch.equal(recording.arena[blocks], content), "an adopted block was written"
    if cached == "all of it":
        assert suspects[0].num_cached == length // block_size * block_size


@pytest.mark.parametrize(
    ("name", "length", "batch", "chunk", "block_size", "cached", "backend"),
    pairwise(tuple(SPECS), SAMPLE_LENGTHS, SAMPLE_BATCHES, CHUNKS, BLOCK_SIZES, CACHED, BACKENDS),
)
def test_tokens_are_those_of_transformers(
    oracles: Oracles,
    name: str,
    length: int,
    batch: int,
    chunk: int,
    block_size: int,
    cached: str,
    backend: str,
) -> None:
    """A sample of the matrix in which every two values of two factors occur together."""
    check(oracles(name), length, batch, chunk, block_size, cached, backend)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", SPECS)
def test_tokens_are_those_of_transformers_in_the_whole_matrix(
    oracles: Oracles, name: str, length: int, batch: int
) -> None:
    """The whole matrix on `cpu`. The reference, which tests/kernels compare with it, is in the
    sample."""
    for chunk, block_size, cached in product(CHUNKS, BLOCK_SIZES, CACHED):
        check(oracles(name), length, batch, chunk, block_size, cached, backend="cpu")
