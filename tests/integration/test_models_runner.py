"""The runner's own contract: its refusals, the memory that it does not touch, and sampled tokens
that do not depend on the batch. test_models_oracle.py compares the arithmetic with transformers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.make_checkpoint import make_checkpoint
from services.engine.batch import Draw, Fault, Row
from services.engine.runner import Runner

from .models_oracle import GREEDY, SPECS, RecordingRunner, random_prompt


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def recording(checkpoint: Path) -> RecordingRunner:
    return RecordingRunner(checkpoint, block_size=4, num_blocks=32)


ROW = Row(token_ids=(1, 2, 3), start=2, block_table=(0, 1), store_from=0, draws=(GREEDY,))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"token_ids": ()}, "row 1: 0 tokens from 2 on"),
        ({"start": -1}, "row 1: 3 tokens from -1 on"),
        ({"token_ids": (1, 384)}, "token ids outside the vocabulary 384"),
        ({"token_ids": (-1,)}, "token ids outside the vocabulary 384"),
        ({"block_table": (0,)}, "row 1: 1 blocks of 4 do not hold 5 positions"),
        ({"block_table": (0, 32)}, "block ids outside the arena's 32 blocks"),
        ({"block_table": (-1, 0)}, "block ids outside the arena's 32 blocks"),
        ({"start": 4094}, "row 1: ends at 4097, the model's context at 4096"),
    ],
    ids=str,
)
def test_a_row_that_cannot_be_computed_is_refused_before_anything_is_written(
    recording: RecordingRunner, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        recording.run([ROW, replace(ROW, **changes)])
    assert recording.arena.isnan().all()


def test_a_step_without_rows_is_refused(recording: RecordingRunner) -> None:
    with pytest.raises(ValueError, match="without rows"):
        recording.run([])


@pytest.mark.parametrize(
    "arena",
    [
        torch.zeros(8, 2, 2, 8, 2, 16),
        torch.zeros(8, 3, 2, 4, 2, 16),
        torch.zeros(8, 2, 2, 4, 2, 16, dtype=torch.bfloat16),
        torch.zeros(8, 2, 2, 4, 32),
    ],
    ids=lambda arena: str(list(arena.shape)),
)
def test_an_arena_of_another_model_is_refused(
    recording: RecordingRunner, arena: torch.Tensor
) -> None:
    with pytest.raises(ValueError, match="arena torch"):
        Runner(recording.model, arena, block_size=4, ops=recording.ops)


def test_only_the_slots_of_new_positions_are_written(recording: RecordingRunner) -> None:
    """Positions 0 .. 9 are in blocks 5, 3, 8 of 4 slots; those below 6 must not be stored."""
    recording.arena[5] = recording.arena[3] = 0.5
    recording.run([Row(range(2, 10), start=2, block_table=(5, 3, 8), store_from=6)])
    expected = torch.zeros(32, 4, dtype=torch.bool)
    expected[3, 2:] = True  # positions 6, 7
    expected[8, :2] = True  # positions 8, 9
    recording.arena[5] = torch.where(recording.arena[5] == 0.5, torch.nan, recording.arena[5])
    recording.arena[3] = torch.where(recording.arena[3] == 0.5, torch.nan, recording.arena[3])
    written = recording.arena.isfinite().transpose(1, 3).flatten(2)  # [block, offset, all the rest]
    assert torch.equal(written.all(dim=2), expected)
    assert torch.equal(written.any(dim=2), expected)


def test_rows_without_a_draw_have_no_token(recording: RecordingRunner) -> None:
    rows = [
        replace(ROW, start=0, draws=(), block_table=(0,)),
        replace(ROW, start=0, block_table=(1,)),
    ]
    nothing, tokens = recording.run(rows)
    assert nothing == ()
    assert isinstance(tokens, tuple)
    assert len(tokens) == 1
    assert recording.run([replace(ROW, start=0, draws=(), block_table=(0,))]) == [()]


def test_several_draws_of_a_row_are_those_of_rows_with_one(recording: RecordingRunner) -> None:
    """64 sequences of one prompt are drawn from its state, some greedily, beside rows that draw
    once or not at all."""
    prompt = random_prompt(9, seed=0)
    draws = [Draw(replace(GREEDY.sampling, temperature=i % 4, seed=3), i) for i in range(64)]
    alone = [recording.run([Row(prompt, 0, (0, 1, 2), draws=(draw,))])[0] for draw in draws]
    other = Row(random_prompt(5, seed=1), 0, (3, 4), draws=(draws[1],))
    silent = Row(random_prompt(4, seed=2), 0, (5,))
    (right,) = recording.run([other])
    rows = [other, silent, Row(prompt, 0, (0, 1, 2), draws=tuple(draws)), replace(other)]
    together = recording.run(rows)
    assert together == [right, (), tuple(token for one in alone for token in one), right]  # type: ignore[union-attr]
    assert len(set(together[2])) > 20


def test_copied_blocks_go_on_as_what_they_were_copied_from(recording: RecordingRunner) -> None:
    """Half a block and a full one are copied in one step; later writes to their sources have no
    effect."""
    prompt = random_prompt(6, seed=0)
    recording.run([Row(prompt, 0, (0, 1))])
    recording.launch([], [(1, 8), (0, 9)])
    (right,) = recording.run([Row((7,), 6, (0, 1), draws=(GREEDY,))])
    assert recording.run([Row((7,), 6, (9, 8), draws=(GREEDY,))]) == [right]
    assert torch.equal(recording.arena[0], recording.arena[9])


def test_warm_up_stores_nothing_and_is_cut_at_the_context(recording: RecordingRunner) -> None:
    recording.warm_up(max_tokens=1_000_000, max_rows=8)
    assert recording.last_logits.shape == (1, 384)
    assert recording.arena.isnan().all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_kv_is_a_fault_of_its_row_and_not_a_token(
    recording: RecordingRunner, temperature: float
) -> None:
    """The row's earlier positions were never stored: the arena has NaN there. The rows beside it,
    one greedy and one drawn, get the same tokens as without it."""
    prompt = random_prompt(4, seed=1)
    whole = [
        Row(prompt, start=0, block_table=(6,), draws=(GREEDY,)),
        Row(prompt, 0, (7,), draws=(Draw(replace(GREEDY.sampling, temperature=1), 0),)),
    ]
    right = recording.run(whole)
    broken = replace(ROW, draws=(Draw(replace(GREEDY.sampling, temperature=temperature), 0),))
    assert recording.run([whole[0], broken, whole[1]]) == [right[0], Fault.NOT_FINITE, right[1]]


@pytest.mark.parametrize("name", ["qwen3-gqa-tied", "qwen2-mha", "llama3-rope-mqa"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_bf16_logits_are_near_those_in_fp32(tmp_path: Path, name: str, backend: str) -> None:
    """With the same bf16 weights: root mean square within 3 % of the logits' spread, every one
    within 10 % (measured: 2 % and 7 %; transformers' own bf16: 2.7 % and 11 %)."""
    directory = make_checkpoint(tmp_path, replace(SPECS[name], dtype="bfloat16", num_layers=4))
    oracle = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for length in (1, 17, 300):
        prompt = random_prompt(length, seed=3)
        with torch.inference_mode():
            exact = oracle(torch.tensor([prompt]), logits_to_keep=1).logits[0, -1]
        num_blocks = -(-length // 16)
        recording = RecordingRunner(directory, 16, num_blocks, backend, torch.bfloat16)
        error = recording.logits([Row(prompt, 0, range(num_blocks), 0, (GREEDY,))])[0] - exact
        assert error.square().mean().sqrt() < 0.03 * exact.std()
        assert error.abs().max() < 0.1 * exact.std()
