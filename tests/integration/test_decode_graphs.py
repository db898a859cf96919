"""Decode steps as graphs: the tokens of eager steps for any number of rows; padding writes nothing.
The graphs are those of `tests.graph_stand_in`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.make_checkpoint import make_checkpoint
from kvops import Backend
from services.engine.batch import Draw, Row, RowResult
from services.engine.device.graphs import cuda_graphs, ladder

from .graph_steps import (
    BLOCKS_EACH,
    MAX_ROWS,
    PROMPTS,
    SIZE,
    DeviceRunner,
    LaunchedKernels,
    PlannedBackends,
    generate,
    only,
    planned_kernels,
    table,
)
from .models_oracle import GREEDY, SPECS, Oracle


@pytest.fixture
def planned() -> Iterator[PlannedBackends]:
    with planned_kernels() as new:
        yield new


@pytest.fixture(scope="module", params=["qwen3-gqa-tied", "mistral-window"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp(request.param), SPECS[request.param])


def test_graphs_give_the_tokens_of_eager_steps(checkpoint: Path) -> None:
    """They are also those of transformers. Prefill steps between them have no graph."""
    eager = DeviceRunner(checkpoint, torch.float32, Backend(LaunchedKernels()))
    graphed = DeviceRunner(checkpoint, torch.float32, Backend(LaunchedKernels())).with_graphs()
    wanted = generate(eager, PROMPTS, [GREEDY] * 6)
    assert generate(graphed, PROMPTS, [GREEDY] * 6) == wanted
    oracle = Oracle(checkpoint)
    for i, prompt in enumerate(PROMPTS):
        known = oracle.answer(prompt).token_ids
        assert wanted[i][: len(known)] == known[: len(wanted[i])]
    replays = [graph.num_replays for graph in graphed.graphs]
    assert sum(replays) == 14 + 2  # prompts of one and of two tokens are decode steps too
    assert all(replays)


def test_graphs_draw_as_eager_steps(checkpoint: Path) -> None:
    """Draws that are no argmax are made by the host here, from the graphs' states."""
    draws = [
        Draw(replace(GREEDY.sampling, temperature=1.0, seed=seed, top_k=seed), 0)
        for seed in range(6)
    ]

    def run(runner: DeviceRunner) -> list[int]:
        found = []
        for i, prompt in enumerate(PROMPTS):
            runner.launch([Row(prompt, 0, table(i))])
        for step in range(3):
            rows = [
                Row((step,), len(prompt) + step, table(i), 0, (draws[i],))
                for i, prompt in enumerate(PROMPTS[: 6 - step])
            ]
            found += [only(result) for result in runner.launch(rows).result()]
        return found

    backend = Backend(LaunchedKernels())
    graphed = DeviceRunner(checkpoint, torch.float32, backend).with_graphs()
    assert run(graphed) == run(DeviceRunner(checkpoint, torch.float32, backend))
    assert [graph.num_replays for graph in graphed.graphs][:2] == [2, 1]


def test_padding_and_capture_write_nothing(checkpoint: Path) -> None:
    """5 rows in a graph of 6. The step changes one slot of each row, and no other byte."""
    runner = DeviceRunner(checkpoint, torch.float32, Backend(LaunchedKernels())).with_graphs()
    assert not runner.kv[1:].any()
    assert runner.kv[0].isnan().all()
    runner.kv[1:] = 7.0
    rows = [Row((1,), 5 + i, table(i), 0, (GREEDY,)) for i in range(5)]
    assert all(isinstance(result, tuple) for result in runner.launch(rows).result())
    assert runner.kv[0].isnan().all()
    changed = (runner.kv[1:] != 7.0).flatten(4).any(dim=-1)
    for i in range(5):
        block, offset = divmod(5 + i, SIZE)
        is_begun = offset == 0  # the rest of a begun block is cleared
        mine = changed[i * BLOCKS_EACH + block]
        assert mine.all() if is_begun else bool(mine[:, :, offset].all())
        changed[i * BLOCKS_EACH + block] = False
    assert not changed.any()


def test_rows_that_only_store_have_no_state(checkpoint: Path) -> None:
    runner = DeviceRunner(checkpoint, torch.float32, Backend(LaunchedKernels()))
    rows = [
        Row((3,), 4, table(0), 0, (GREEDY,)),
        Row((4,), 2, table(1)),
        Row((5,), 6, table(2), 0, (GREEDY,)),
    ]
    wanted = runner.hidden(rows)
    assert torch.equal(runner.with_graphs().hidden(rows), wanted)
    assert wanted.shape[0] == 2


def tokens_of(result: RowResult) -> list[int]:
    assert isinstance(result, tuple), result
    return list(result)


@pytest.mark.parametrize("is_planned", [False, True])
def test_tokens_among_drafts_are_rows_of_a_graph(
    checkpoint: Path, planned: PlannedBackends, is_planned: bool
) -> None:
    """2 rows with 3 and 1 drafts are a step of 6 rows. At each place up to the first wrong draft
    they draw what steps of one token draw. Two tokens without drafts are rows of a graph too."""
    dtype = torch.bfloat16 if is_planned else torch.float32
    backend = planned() if is_planned else Backend(LaunchedKernels())
    alone = DeviceRunner(checkpoint, dtype, backend)
    found = generate(alone, PROMPTS, [GREEDY] * 6)
    graphed = DeviceRunner(checkpoint, dtype, backend).with_graphs()
    for i, prompt in enumerate(PROMPTS[:2]):
        graphed.launch([Row(prompt, 0, table(i))])
    before = [graph.num_replays for graph in graphed.graphs]
    for wrong in (False, True):
        drafts = [[*found[0][1:3], found[0][3] - wrong], [found[1][1] - wrong]]
        rows = [
            Row(
                [found[i][0], *drafts[i]],
                len(prompt),
                table(i),
                0,
                draws=(GREEDY,) * (1 + len(drafts[i])),
                num_drafts=len(drafts[i]),
            )
            for i, prompt in enumerate(PROMPTS[:2])
        ]
        first, second = (tokens_of(one) for one in graphed.launch(rows).result())
        right = (3, 1) if wrong else (4, 2)
        assert first[: right[0]] == found[0][1:][: right[0]]
        assert second[: right[1]] == found[1][1:][: right[1]]
    row = Row(found[0][2:4], len(PROMPTS[0]) + 2, table(0), 0, (GREEDY,))
    assert graphed.launch([row]).result() == [(found[0][4],)]
    replays = [graph.num_replays - n for graph, n in zip(graphed.graphs, before, strict=True)]
    assert replays == [2, 0, 0, 1, 0]


def test_plans_reach_the_graphs_that_were_captured(
    checkpoint: Path, planned: PlannedBackends
) -> None:
    """FlashInfer plans each step on the host; its wrapper for a graph keeps its buffers."""
    wanted = generate(
        DeviceRunner(checkpoint, torch.bfloat16, Backend(LaunchedKernels())), PROMPTS, [GREEDY] * 6
    )
    backend = planned()
    eager = DeviceRunner(checkpoint, torch.bfloat16, backend)
    assert generate(eager, PROMPTS, [GREEDY] * 6) == wanted
    graphed = DeviceRunner(checkpoint, torch.bfloat16, backend).with_graphs()
    assert generate(graphed, PROMPTS, [GREEDY] * 6) == wanted
    assert planned.rows_of_graphs().keys() == set(ladder(MAX_ROWS))
    assert all(
        wrapper.backend == "fa2"
        for wrapper in planned.wrappers
        if wrapper.in_graph or wrapper.query_len == 1
    )


def test_graphs_of_a_runner_share_memory_that_is_no_other_runner_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyTorch refuses a pool whose graphs are all gone, as those that were recorded to measure."""
    used: list[Any] = []
    handles = iter(range(9))

    @contextmanager
    def graph(found: object, *, pool: object, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        used.append(pool)
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    for _ in range(2):
        new_graph = cuda_graphs()
        for _ in range(3):
            new_graph().capture(lambda: torch.zeros(1))
    assert used == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("max_rows", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (64, [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]),
        (70, [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 70]),
    ],
)
def test_the_ladder_pads_no_step_by_more_than_a_third(max_rows: int, sizes: list[int]) -> None:
    assert ladder(max_rows) == sizes
    for num_rows in range(4, max_rows + 1):
        size = next(size for size in sizes if size >= num_rows)
        assert (size - num_rows) * 3 <= size
