"""Each family gives transformers' greedy tokens, from checkpoints that transformers has written, on
both backends that compute it on a CPU; and the same bits whatever the batch."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch

from .family_checkpoints import CASES, make
from .models_oracle import NUM_NEW_TOKENS, Oracle, RecordingRunner, Trial, random_prompt

WHOLE = 4096
Checkpoints = Callable[[str], tuple[Path, Oracle]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    @cache
    def of(name: str) -> tuple[Path, Oracle]:
        directory = make(tmp_path_factory.mktemp("family"), CASES[name])
        return directory, Oracle(directory)

    return of


def placed(recording: RecordingRunner, lengths: Sequence[int]) -> list[Trial]:
    return [recording.place(random_prompt(length, seed=length)) for length in lengths]


@pytest.mark.parametrize(
    ("backend", "chunk", "block_size"), [("cpu", 7, 16), ("cpu", WHOLE, 5), ("reference", 64, 16)]
)
@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_are_those_of_transformers(
    checkpoints: Checkpoints, name: str, backend: str, chunk: int, block_size: int
) -> None:
    """All prompts in one batch: the last one comes when the others decode."""
    directory, oracle = checkpoints(name)
    case = CASES[name]
    num_blocks = sum(case.lengths) // block_size + 3 * len(case.lengths) * NUM_NEW_TOKENS
    recording = RecordingRunner(directory, block_size, num_blocks, backend, context=case.context)
    trials = placed(recording, case.lengths)
    recording.decode_all(trials, chunk, late=1)
    for trial in trials:
        answer = oracle.answer(trial.prompt)
        assert trial.new_tokens == answer.token_ids
        torch.testing.assert_close(torch.stack(trial.logits), answer.logits, rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", CASES)
def test_bits_do_not_depend_on_the_batch(checkpoints: Checkpoints, name: str) -> None:
    """In bf16 on the CPU: alone in one piece, and in chunks on three threads beside others."""
    directory, _ = checkpoints(name)
    case = CASES[name]

    def logits(num_others: int, chunk: int, num_threads: int) -> torch.Tensor:
        recording = RecordingRunner(
            *(directory, 16, 400, "cpu", torch.bfloat16),
            num_threads=num_threads,
            context=case.context,
        )
        own, *others = placed(recording, (max(case.lengths), *range(5, 5 + num_others)))
        recording.decode_all([*others, own], chunk, late=1)
        return torch.stack(own.logits)

    assert torch.equal(logits(0, WHOLE, 1), logits(9, 29, 3))
