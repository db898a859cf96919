"""Graphs of steps with Triton's kernels in them, in Triton's interpreter: their tokens beside those
of transformers. The graphs are those of `tests.graph_stand_in`. pytest does not collect this file:
`test_triton.py` runs it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.make_checkpoint import CheckpointSpec, make_checkpoint
from kvops import Backend
from kvops.triton import TritonKernels
from services.engine.batch import LoadedAdapter, Row
from services.model.checkpoint.adapter import AdapterFiles
from tests.adapters import ATTENTION, make_adapter
from tests.graph_stand_in import launched
from tests.integration.graph_steps import KERNELS, DeviceRunner, only, table
from tests.integration.models_oracle import GREEDY, Oracle, random_prompt


class LaunchedTriton(TritonKernels):
    """Triton's kernels, each of which counts as one launch."""


_PARTS_OF_THE_REFERENCE = {"store_kv", "rope", "clear_begun_blocks"}
for _name in {*KERNELS, "store_heads", "add_low_rank"} - _PARTS_OF_THE_REFERENCE:
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


ADAPTERS: tuple[dict[str, Any], ...] = (
    {"r": 5, "lora_alpha": 3, "target_modules": ATTENTION},
    {"r": 20, "target_modules": ["v_proj", "down_proj"]},
    {"layers_to_transform": [1]},
)


def adapted_rows(adapters: Sequence[LoadedAdapter | None], start: int) -> list[Row]:
    return [
        Row((7 + start,), start, table(i), 0, (GREEDY,), adapter=adapter)
        for i, adapter in enumerate(adapters)
    ]


def test_any_mix_of_adapters_replays_the_same_graphs(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of the linears of each adapter by themselves, which are launched kernel by kernel, have
    the same states. A step without adapters replays a graph without their kernels. So it is for a
    prompt beside a row that decodes."""
    eager = DeviceRunner(checkpoint, torch.float32, Backend(LaunchedTriton()))
    graphed = DeviceRunner(checkpoint, torch.float32, Backend(LaunchedTriton()))
    monkeypatch.setattr("services.engine.device.graphs._NUM_WARM_UPS", 0)  # nothing is compiled
    monkeypatch.setattr("services.engine.device.graphs.ladder", lambda max_rows: [max_rows])
    graphed.with_graphs(max_tokens=4, max_rows=4, max_lora_rank=20)
    folders = [
        make_adapter(tmp_path / str(number), checkpoint, number, **fields)
        for number, fields in enumerate(ADAPTERS)
    ]

    def loaded(runner: DeviceRunner) -> list[LoadedAdapter | None]:
        config = runner.model.whole_config
        files = [AdapterFiles.read(folder, config, 20) for folder in folders]
        return [None, *(LoadedAdapter(f.digest, runner.model.load_adapter(f)) for f in files)]

    of_eager, of_graphs = loaded(eager), loaded(graphed)
    sizes = [len(graph.launches) for graph in graphed.graphs]
    mixes = [(0, 0, 1, 2), (1, 3, 3), (0, 0, 0, 0), (0, 1, 2, 3)]
    for start, mix in enumerate(mixes):
        wanted = eager.hidden(adapted_rows([of_eager[i] for i in mix], start))
        before = [graph.num_replays for graph in graphed.graphs]
        found = graphed.hidden(adapted_rows([of_graphs[i] for i in mix], start))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        (used,) = (
            sizes[number]
            for number, graph in enumerate(graphed.graphs)
            if graph.num_replays > before[number]
        )
        # One more launch in this stand-in for each of 4 linears of 2 layers.
        assert used - min(sizes) == (8 if any(mix) else 0)
    for mix in ((1, 2), (0, 3), (0, 0)):

        def chunks(of: list[LoadedAdapter | None], mix: Sequence[int] = mix) -> list[Row]:
            first, second = (of[i] for i in mix)
            row = Row((9,), len(mixes), table(1), 0, (GREEDY,), adapter=second)
            return [Row((4, 5, 6), 0, table(4), 0, (GREEDY,), adapter=first), row]

        wanted, num_replays = eager.hidden(chunks(of_eager)), graphed.num_replays
        torch.testing.assert_close(graphed.hidden(chunks(of_graphs)), wanted, rtol=1e-4, atol=1e-4)
        assert graphed.num_replays == num_replays + 1
    plain = graphed.hidden(adapted_rows([None] * 4, len(mixes)))
    mixed = graphed.hidden(adapted_rows([of_graphs[i] for i in (0, 1, 2, 3)], len(mixes)))
    assert torch.equal(plain[0], mixed[0])
    assert not torch.isclose(plain[1:], mixed[1:], atol=0.1).all(dim=1).any()
