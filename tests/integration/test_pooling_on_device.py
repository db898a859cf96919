"""Embeddings of a device that draws, as a GPU: it adds up the states, and no other row waits."""

from pathlib import Path

import pytest
import torch

from bench.make_checkpoint import make_checkpoint
from kvops import Backend, backend
from services.engine.batch import Row, RowOutput
from services.engine.device.flights import DrawnFlight
from services.engine.models import load_model
from services.engine.runner import Runner
from services.engine.sequences.pooling import Pooler
from services.protocol.messages import Pooling, PoolingMode

from .graph_steps import DeviceRunner, LaunchedKernels, only, table
from .models_oracle import GREEDY, SPECS, Oracle, random_prompt

PROMPT = random_prompt(13, 1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), SPECS["qwen3-gqa-tied"])


def embedding(runner: Runner, mode: PoolingMode, chunks: tuple[int, ...]) -> list[float]:
    """The prompt's embedding, computed in chunks that end at these positions."""
    pooler, start = Pooler(Pooling(mode, dimensions=16)), 0
    for end in chunks:
        num_states = pooler.num_states(end - start, is_last=end == len(PROMPT))
        row = Row(PROMPT[start:end], start, table(0), num_states=num_states)
        (result,) = runner.launch([row]).result()
        if num_states:
            assert isinstance(result, RowOutput)
            assert result.states is not None
            pooler.add(result.states)
        start = end
    return list(pooler.embedding())


@pytest.mark.parametrize("mode", PoolingMode)
@pytest.mark.parametrize("chunks", [(13,), (5, 12, 13)])
def test_a_device_pools_as_the_host(
    checkpoint: Path, mode: PoolingMode, chunks: tuple[int, ...]
) -> None:
    device = DeviceRunner(checkpoint, torch.float32, Backend(LaunchedKernels()))
    ops = backend("reference")
    host = Runner(load_model(checkpoint, torch.float32, ops), device.kv.clone(), 4, ops)
    found, wanted = (embedding(runner, mode, chunks) for runner in (device, host))
    assert found == pytest.approx(wanted, abs=1e-6)


def test_a_row_beside_an_embedding_waits_for_one_state(checkpoint: Path) -> None:
    """The sum of 13 states reaches the host, in a replay of a graph, not the states."""
    runner = DeviceRunner(checkpoint, torch.float32, Backend(LaunchedKernels())).with_graphs(16)
    prompt = random_prompt(3, 3)
    rows = [Row(PROMPT, 0, table(0), num_states=13), Row(prompt, 0, table(1), draws=(GREEDY,))]
    flight = runner.launch(rows)
    assert isinstance(flight, DrawnFlight)
    pooled, drawn = flight.result()
    assert isinstance(pooled, RowOutput)
    assert pooled.states is not None
    assert pooled.states.shape == (1, 64)
    assert only(drawn) == Oracle(checkpoint).answer(prompt).token_ids[0]
    assert runner.num_replays == 1


def test_a_sum_that_is_not_finite_breaks_its_row_alone(checkpoint: Path) -> None:
    runner = DeviceRunner(checkpoint, torch.float32, Backend(LaunchedKernels()))
    runner.kv[table(0)[0]] = float("nan")
    rows = [Row(PROMPT[4:], 4, table(0), num_states=9), Row((1, 2), 0, table(1), draws=(GREEDY,))]
    broken, drawn = runner.launch(rows).result()
    assert not isinstance(broken, (tuple, RowOutput))
    assert isinstance(drawn, tuple)
