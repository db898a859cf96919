"""Steps with chunks of prompts as graphs: the tokens of eager steps; padding writes nothing. The
graphs are those of `tests.graph_stand_in`; Triton's kernels in them are in
`tests/kernels/triton_graphs_suite.py`."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.make_checkpoint import make_checkpoint
from kvops import Backend
from kvops.step import AttentionShape, AttentionStep
from services.engine.batch import Row
from services.engine.device.graphs import GraphShape, graph_shapes

from .graph_steps import (
    PROMPTS,
    SIZE,
    DeviceRunner,
    LaunchedKernels,
    generate,
    only,
    planned_kernels,
    table,
)
from .models_oracle import GREEDY, SPECS, Oracle, random_prompt

MAX_TOKENS = 64


@pytest.fixture(scope="module", params=["qwen3-gqa-tied", "mistral-window"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp(request.param), SPECS[request.param])


class CountedKernels(LaunchedKernels):
    """Counts the linears that are launched one by one, or recorded; a replay launches none."""

    num_linears = 0

    def linear(self, *args: Any) -> Tensor:
        self.num_linears += 1
        return super().linear(*args)


def replays(runner: DeviceRunner) -> dict[int, int]:
    """The replays of the graphs of more tokens than a decode step has rows, by their tokens."""
    found = Counter[int]()
    for shape, graph in runner.graph_of.items():
        if shape.query_len > 1:
            found[shape.num_tokens] += graph.num_replays
    return dict(found)


def test_a_short_new_part_behind_a_cached_prefix_is_a_replay(checkpoint: Path) -> None:
    """64 new tokens after 16 cached ones: no kernel of the forward pass is launched by itself. The
    token is transformers'."""
    kernels = CountedKernels()
    runner = DeviceRunner(checkpoint, torch.float32, Backend(kernels)).with_graphs(MAX_TOKENS)
    prompt, blocks = random_prompt(80, 7), range(1, 1 + 80 // SIZE)
    runner.launch([Row(prompt[:16], 0, blocks)]).result()
    before = kernels.num_linears
    (result,) = runner.launch([Row(prompt[16:], 16, blocks, draws=(GREEDY,))]).result()
    assert kernels.num_linears - before == 1  # the head
    assert replays(runner) == {4: 0, 8: 0, 16: 1, 32: 0, 64: 1}
    assert only(result) == Oracle(checkpoint).answer(prompt).token_ids[0]


def test_chunks_and_decode_steps_in_turn_give_the_tokens_of_transformers(checkpoint: Path) -> None:
    """Prompts of 1 to 13 tokens between decode steps of other sequences."""
    runner = DeviceRunner(checkpoint, torch.float32, Backend(LaunchedKernels()))
    found = generate(runner.with_graphs(MAX_TOKENS), PROMPTS, [GREEDY] * 6)
    oracle = Oracle(checkpoint)
    for i, prompt in enumerate(PROMPTS):
        known = oracle.answer(prompt).token_ids
        assert found[i][: len(known)] == known[: len(found[i])]
    assert replays(runner) == {4: 1, 8: 1, 16: 2, 32: 0, 64: 0}  # 5, 9 and 13 tokens


def test_a_step_mixes_chunks_and_decoding_rows(checkpoint: Path) -> None:
    """A whole prompt, the second half of another, a row that decodes, and a chunk that draws
    nothing, in one replay; the states are those of an eager step."""

    def states(runner: DeviceRunner) -> Tensor:
        first, second, third = (random_prompt(n, n) for n in (9, 12, 7))
        runner.hidden([Row(second[:6], 0, table(1)), Row(third, 0, table(2))])
        return runner.hidden(
            [
                Row(first, 0, table(0), draws=(GREEDY,)),
                Row(second[6:], 6, table(1), draws=(GREEDY,)),
                Row((11,), 7, table(2), draws=(GREEDY,)),
                Row(first, 0, table(3)),
            ]
        )

    graphed, eager = (
        DeviceRunner(checkpoint, torch.float32, Backend(LaunchedKernels())) for _ in range(2)
    )
    torch.testing.assert_close(states(graphed.with_graphs(MAX_TOKENS)), states(eager))
    assert replays(graphed)[32] == 1
    torch.testing.assert_close(graphed.kv[1:], eager.kv[1:])


def test_padded_tokens_write_nothing_and_change_no_bit(checkpoint: Path) -> None:
    """5 tokens in a graph of 8: the 3 beside them may be padding, or another row's. The step
    changes the slots of its tokens only."""
    runner = DeviceRunner(checkpoint, torch.float32, Backend(LaunchedKernels()))
    runner.with_graphs(8)
    assert not runner.kv[1:].any(), "a capture writes nothing"
    row, other = Row((1, 2, 3, 4, 5), 0, table(0), draws=(GREEDY,)), Row((6, 7, 8), 0, table(1))
    full = runner.hidden([row, other])
    runner.kv[1:] = 7.0
    assert torch.equal(runner.hidden([row]), full)
    assert replays(runner) == {4: 0, 8: 2}
    assert runner.kv[0].isnan().all(), "padded rows name this block"
    first, *_ = table(0)
    changed = (runner.kv != 7.0).flatten(1).any(dim=1).nonzero().flatten().tolist()
    assert changed == [0, first, first + 1]


def test_all_states_of_a_prompt_may_be_wanted(checkpoint: Path) -> None:
    row = Row((5, 6, 7), 0, table(0), num_states=3)
    graphed, eager = (
        DeviceRunner(checkpoint, torch.float32, Backend(LaunchedKernels())) for _ in range(2)
    )
    found = graphed.with_graphs(8).hidden([row])
    assert replays(graphed)[4] == 1
    torch.testing.assert_close(found, eager.hidden([row]))


def test_flashinfer_plans_chunks_for_their_graphs(checkpoint: Path) -> None:
    with planned_kernels() as new:
        eager = DeviceRunner(checkpoint, torch.bfloat16, new())
        graphed = DeviceRunner(checkpoint, torch.bfloat16, new()).with_graphs(16)
        wanted = generate(eager, PROMPTS, [GREEDY] * 6)
        assert generate(graphed, PROMPTS, [GREEDY] * 6) == wanted
        assert sum(replays(graphed).values()) == 4
        assert {4, 8, 16} <= {one.query_len for one in new.wrappers if one.in_graph}


def test_a_graph_s_partial_results_fit_into_its_workspace() -> None:
    """Qwen3-8B's 512 tokens of up to 16 rows on an H200: 2 x 132 // 8 = 33 programs a KV head, each
    128 lines. Qwen3-235B's: 16 lines a token, so 512 x 16 / 128 + 16 = 80 programs."""
    with planned_kernels():
        from kvops.attention.flashinfer import graph_bytes

        def needed(num_heads: int, num_kv_heads: int) -> int:
            shape = AttentionShape(num_heads, num_kv_heads, 128, 16, torch.bfloat16, torch.bfloat16)
            begins, one = np.array([0, *[512] * 16], np.int32), np.ones(16, np.int32)
            pages = torch.zeros(16, dtype=torch.int32)
            step = AttentionStep(shape, begins, np.arange(17, dtype=np.int32), one, pages, 512)
            return graph_bytes(step, num_sms=132)

        assert needed(32, 8) == 4 * 32 * 33 * 128 * 129
        assert needed(64, 4) == 4 * 64 * 80 * 128 * 129


@pytest.mark.parametrize("max_tokens", [1, 2, 300, 512, 8192])
def test_padding_at_most_doubles_a_step(max_tokens: int) -> None:
    shapes = graph_shapes(4, max_tokens)
    assert shapes[0] == GraphShape(1, 1, 1)
    for num_tokens in range(3, min(max_tokens, 512) + 1):
        shape = next(shape for shape in shapes if shape.fits(num_tokens, 1))
        assert num_tokens <= shape.num_tokens < 2 * num_tokens
        assert shape.num_rows <= shape.num_tokens
    assert not any(shape.fits(513, 1) or shape.fits(512, 64) for shape in shapes)


@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "wanted"),
    [
        (5, 5, GraphShape(6, 6, 1)),
        (5, 1, GraphShape(8, 8, 8)),
        (300, 15, GraphShape(512, 16, 512)),
        (300, 16, GraphShape(512, 64, 512)),
        (20, 19, GraphShape(32, 32, 32)),
        (300, 64, None),
    ],
)
def test_a_step_has_the_smallest_graph_that_fits(
    num_tokens: int, num_rows: int, wanted: GraphShape | None
) -> None:
    shapes = graph_shapes(6, 512)
    found = next((shape for shape in shapes if shape.fits(num_tokens, num_rows)), None)
    assert found == wanted


def test_every_shape_has_a_graph_with_adapters_too() -> None:
    """Beside the one without, and none of them takes a step of the other kind."""
    shapes = graph_shapes(6, 512, with_adapters=True)
    assert [shape for shape in shapes if not shape.has_adapters] == graph_shapes(6, 512)
    assert len(shapes) == 2 * len(graph_shapes(6, 512))
    for num_tokens, num_rows in ((5, 5), (5, 1), (300, 16)):
        found = [
            next(shape for shape in shapes if shape.fits(num_tokens, num_rows, kind))
            for kind in (False, True)
        ]
        assert found == [found[0], replace(found[0], has_adapters=True)]
