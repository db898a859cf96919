"""Sampling parameters compared with transformers, where it defines them as vLLM does, and on the
runner: the same tokens alone and in a batch, at once and after a recompute."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from bench.make_checkpoint import make_checkpoint
from services.engine.batch import Draw, Row
from services.engine.sequences.penalty_state import PenaltyState
from services.protocol.ticket import SamplingParams

from .models_oracle import GREEDY, RecordingRunner, random_prompt

PROMPT = [3, 1, 4, 1, 5]
OUTPUT = [9, 2, 6, 2]
ENDS = (7, 8)


def ours(logits: torch.Tensor, **changes: Any) -> torch.Tensor:
    p = replace(GREEDY.sampling, **changes)
    adjustment = PenaltyState(p, [*PROMPT, *OUTPUT], len(PROMPT), ENDS).adjustment()
    return logits if adjustment is None else adjustment.applied(logits)


def theirs(processor: LogitsProcessor, tokens: Sequence[int], logits: torch.Tensor) -> Any:
    return processor(torch.tensor([list(tokens)]), logits[None].clone())[0]


@pytest.fixture
def logits() -> torch.Tensor:
    return 5 * torch.randn(12, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("penalty", [0.5, 1.3, 4.0])
def test_a_repetition_penalty_is_transformers(logits: torch.Tensor, penalty: float) -> None:
    penalty = torch.tensor(penalty).item()
    expected = theirs(RepetitionPenaltyLogitsProcessor(penalty), [*PROMPT, *OUTPUT], logits)
    assert torch.equal(ours(logits, repetition_penalty=penalty), expected)


@pytest.mark.parametrize("min_tokens", [0, 4, 5, 9])
def test_min_tokens_is_transformers_min_new_tokens(logits: torch.Tensor, min_tokens: int) -> None:
    processor = MinNewTokensLengthLogitsProcessor(len(PROMPT), min_tokens, list(ENDS), device="cpu")
    expected = theirs(processor, [*PROMPT, *OUTPUT], logits)
    assert torch.equal(ours(logits, min_tokens=min_tokens), expected)


def test_bad_words_are_transformers_within_the_output(logits: torch.Tensor) -> None:
    """transformers also searches the prompt, which vLLM does not."""
    words = [[6, 2, 10], [2, 11], [5, 9], [2, 9], [3], [9, 2, 6, 2, 0], [1, 9, 2, 6, 2, 4]]
    expected = theirs(NoBadWordsLogitsProcessor(words), OUTPUT, logits)
    assert torch.equal(ours(logits, bad_words=tuple(map(tuple, words))), expected)
    assert expected.isinf().nonzero().squeeze(1).tolist() == [0, 3, 9, 10, 11]


# On the runner


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(params=["cpu", "reference"])
def recording(checkpoint: Path, request: pytest.FixtureRequest) -> RecordingRunner:
    return RecordingRunner(checkpoint, block_size=4, num_blocks=256, backend=request.param)


def decoded(
    recording: RecordingRunner,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    num_tokens: int,
) -> list[list[int]]:
    """All in one batch, each with its own growing history."""
    tokens = [list(prompt) for prompt in prompts]
    histories = [
        PenaltyState(p, mine, len(prompt), [])
        for p, mine, prompt in zip(params, tokens, prompts, strict=True)
    ]
    starts = [0] * len(tokens)
    for _ in range(num_tokens):
        rows = [
            Row(
                mine[start:],
                start,
                range(10 * i, 10 * i + 10),
                draws=(Draw(p, i % 3, history.adjustment()),),
            )
            for i, (mine, start, p, history) in enumerate(
                zip(tokens, starts, params, histories, strict=True)
            )
        ]
        starts = [len(mine) for mine in tokens]
        for mine, drawn in zip(tokens, recording.run(rows), strict=True):
            assert isinstance(drawn, tuple)
            mine += drawn
    return [mine[len(prompt) :] for mine, prompt in zip(tokens, prompts, strict=True)]


def test_greedy_tokens_with_a_penalty_are_those_of_transformers(
    recording: RecordingRunner, checkpoint: Path
) -> None:
    prompt = list(random_prompt(12, seed=0))
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, 12, dtype=torch.long),
            do_sample=False,
            max_new_tokens=24,
            eos_token_id=None,
            pad_token_id=0,
            repetition_penalty=1.5,
        )
    expected = output[0, 12:].tolist()
    p = replace(GREEDY.sampling, repetition_penalty=1.5)
    assert decoded(recording, [prompt], [p], 24) == [expected]
    assert decoded(recording, [prompt], [GREEDY.sampling], 24) != [expected]
