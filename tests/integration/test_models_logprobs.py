"""Logprobs of prompts and generated tokens: those of the model's logits and of transformers, with
the same bits in any chunks and any batch (law 10)."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench.make_checkpoint import CheckpointSpec, make_checkpoint
from services.engine.batch import Draw, Row, RowOutput, Scoring
from services.protocol.logprobs import LogprobColumns, Logprobs
from services.protocol.ticket import SamplingParams

from .models_oracle import RecordingRunner, random_prompt

SPEC = CheckpointSpec(hidden_size=148, intermediate_size=212, vocab_size=601, head_dim=20)
SPECS = {
    "qwen3": replace(SPEC, num_heads=6, num_kv_heads=2),
    "llama": replace(SPEC, family="llama", num_layers=3, num_kv_heads=4, tied=False),
}
KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PROMPT = random_prompt(150, seed=0)
NUM_TOP = 5
PLAIN = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=3, max_tokens=9)
BLOCK_SIZE = 16

Make = Callable[[str], Path]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Make:
    @cache
    def make(name: str) -> Path:
        return make_checkpoint(tmp_path_factory.mktemp(name), SPECS[name])

    return make


def make_recording(directory: Path, kind: str = "float32", num_threads: int = 1) -> RecordingRunner:
    return RecordingRunner(directory, BLOCK_SIZE, 400, dtype=KINDS[kind], num_threads=num_threads)


def rows_of(
    recording: RecordingRunner, prompt: tuple[int, ...], chunk: int, sampling: SamplingParams
) -> list[Row]:
    """All chunks of a prompt whose logprobs are requested; the last one draws."""
    blocks = [recording.free.pop() for _ in range(len(prompt) // BLOCK_SIZE + 1)]
    rows = []
    for start in range(0, len(prompt), chunk):
        end = min(start + chunk, len(prompt))
        targets = prompt[start + 1 : end + 1]
        rows.append(
            Row(
                prompt[start:end],
                start,
                blocks,
                0,
                (Draw(sampling, 0),) if end == len(prompt) else (),
                Scoring(targets, NUM_TOP) if targets else None,
            )
        )
    return rows


def run_alone(recording: RecordingRunner, rows: list[Row]) -> RowOutput:
    """The logprobs of all chunks, one after another."""
    parts = list[LogprobColumns]()
    for row in rows:
        (told,) = recording.run([row])
        if isinstance(told, RowOutput) and told.prompt is not None:
            parts.append(told.prompt)
    assert isinstance(told, RowOutput)
    return replace(told, prompt=LogprobColumns.joined(parts))


def prompt_of(told: RowOutput) -> list[Logprobs]:
    assert told.prompt is not None
    return list(told.prompt.rows())


def asked(temperature: float = 0.0) -> SamplingParams:
    return replace(PLAIN, temperature=temperature, logprobs=NUM_TOP)


@torch.inference_mode()
def exact_logprobs(directory: Path, tokens: tuple[int, ...]) -> Tensor:
    """The log-probabilities of transformers, [len(tokens), vocab_size]."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits.double().log_softmax(dim=-1)


def assert_is(found: Logprobs, exact: Tensor, token_id: int) -> None:
    """`exact`: of one position. Ranks may differ where logits are closer than fp32 can
    distinguish."""
    assert found.logprob == pytest.approx(exact[token_id].item(), abs=1e-4)
    larger = (
        int((exact > exact[token_id] + 1e-4).sum()),
        int((exact > exact[token_id] - 1e-4).sum()),
    )
    assert larger[0] < found.rank <= larger[1] + 1
    assert found.top_logprobs == pytest.approx(exact.topk(NUM_TOP).values.tolist(), abs=1e-4)
    there = exact[list(found.top_token_ids)].tolist()
    assert found.top_logprobs == pytest.approx(there, abs=1e-4)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("chunk", [64, 4096])
def test_logprobs_equal_transformers(checkpoints: Make, name: str, chunk: int) -> None:
    """The logprobs of the whole prompt, and of the token drawn after it."""
    recording = make_recording(checkpoints(name))
    told = run_alone(recording, rows_of(recording, PROMPT, chunk, asked()))
    (token,), (of_token,) = told.tokens, told.logprobs
    exact = exact_logprobs(checkpoints(name), PROMPT)
    scores = prompt_of(told)
    assert len(scores) == len(PROMPT) - 1
    for position, found in enumerate(scores, 1):
        assert_is(found, exact[position - 1], PROMPT[position])
    assert_is(of_token, exact[-1], token)
    assert of_token.rank == 1


def test_the_composed_model_says_the_same(checkpoints: Make) -> None:
    """The composition in PyTorch, which runs on a GPU."""
    recording = make_recording(checkpoints("qwen3"))
    expected = run_alone(recording, rows_of(recording, PROMPT, 64, asked()))
    composed = RecordingRunner(checkpoints("qwen3"), BLOCK_SIZE, 40, "reference")
    found = run_alone(composed, rows_of(composed, PROMPT, 64, asked()))
    assert found.tokens == expected.tokens
    for one, other in zip(prompt_of(found), prompt_of(expected), strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-4)
