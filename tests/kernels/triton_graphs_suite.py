"""Graphs of steps with Triton's kernels in them, in Triton's interpreter: their tokens beside those
of transformers. The graphs are those of `tests.graph_stand_in`. pytest does not collect this file:
`test_triton.py` runs it."""

from pathlib import Path

import pytest
import torch

from bench.make_checkpoint import CheckpointSpec, make_checkpoint
from kvops import Backend
from kvops.triton import TritonKernels
from services.engine.batch import Row
from tests.graph_stand_in import launched
from tests.integration.graph_steps import KERNELS, DeviceRunner, only, table
from tests.integration.models_oracle import GREEDY, Oracle, random_prompt


class LaunchedTriton(TritonKernels):
    """Triton's kernels, each of which counts as one launch."""


for _name in {*KERNELS, "store_heads"} - {"clear_begun_blocks"}:
    setattr(LaunchedTriton, _name, launched(getattr(TritonKernels, _name)))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer that attends to all positions, and one with a window."""
    return make_checkpoint(tmp_path_factory.mktemp("model"), CheckpointSpec(sliding_window=20))


@pytest.fixture(scope="module")
def runner(checkpoint: Path) -> DeviceRunner:
    runner = DeviceRunner(checkpoint, torch.float32, Backend(LaunchedTriton()))
    return runner.with_graphs(max_tokens=16, max_rows=1)


def test_tokens_behind_a_cached_prefix_are_those_of_transformers(
    runner: DeviceRunner, checkpoint: Path
) -> None:
    """24 tokens are cached; 13 new ones, and the next 2 tokens, are replays."""
    prompt, blocks = random_prompt(37, 7), range(1, 11)
    runner.launch([Row(prompt[:24], 0, blocks)]).result()
    before, found = runner.num_replays, list(prompt[24:])
    for start in (24, 37, 38):
        row = Row(found[start - 24 :], start, blocks, draws=(GREEDY,))
        found += [only(result) for result in runner.launch([row]).result()]
    assert found[13:] == Oracle(checkpoint).answer(prompt).token_ids[:3]
    assert runner.num_replays - before == 3


def test_prompts_and_a_decoding_row_share_a_replay(runner: DeviceRunner, checkpoint: Path) -> None:
    oracle, before = Oracle(checkpoint), runner.num_replays
    prompts = [random_prompt(n, n) for n in (5, 12, 7)]
    answers = [oracle.answer(prompt).token_ids for prompt in prompts]
    runner.launch([Row(prompts[1][:6], 0, table(1)), Row(prompts[2], 0, table(2))]).result()
    rows = [
        Row(prompts[0], 0, table(0), draws=(GREEDY,)),
        Row(prompts[1][6:], 6, table(1), draws=(GREEDY,)),
        Row(answers[2][:1], 7, table(2), draws=(GREEDY,)),
    ]
    found = [only(result) for result in runner.launch(rows).result()]
    assert found == [answers[0][0], answers[1][0], answers[2][1]]
    assert runner.num_replays - before == 2


def test_padded_tokens_write_nothing_and_change_no_bit(runner: DeviceRunner) -> None:
    """The 3 tokens beside 5 in a graph of 8 may be padding, or another row's."""
    row, other = Row((1, 2, 3, 4, 5), 0, table(0), draws=(GREEDY,)), Row((6, 7, 8), 0, table(1))
    full, before = runner.hidden([row, other]), runner.num_replays
    runner.kv[1:] = 7.0
    assert torch.equal(runner.hidden([row]), full)
    assert runner.num_replays - before == 1
    assert runner.kv[0].isnan().all(), "padded rows name this block"
    first, *_ = table(0)
    changed = (runner.kv != 7.0).flatten(1).any(dim=1).nonzero().flatten().tolist()
    assert changed == [0, first, first + 1]
