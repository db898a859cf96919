"""CUDA graphs and planned attention with several ranks: the tokens of one rank, from graphs that
all ranks replay together. Ranks are threads here, with graphs of `tests.graph_stand_in` and gloo.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvops
from bench.make_checkpoint import make_checkpoint
from kvops import Backend
from services.engine.batch import Row
from services.engine.device.graphs import ladder
from services.engine.ranks.calls import Peers
from services.engine.ranks.collectives import Collectives
from services.engine.ranks.rank import Rank, follow
from services.engine.runner import Runner
from services.worker.ranks.processes import Ranks
from tests.graph_stand_in import RecordedGraph, launched

from .graph_steps import MAX_ROWS, PROMPTS, SIZE, LaunchedKernels, generate, planned_kernels
from .models_oracle import GREEDY, SPECS, Oracle
from .ranks import RankedRunner

NUM_BLOCKS = 64


class ThreadedRanks(Ranks):
    """Ranks in threads of this process. `graphs`: those of each rank, in the order of recording."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.graphs: list[list[RecordedGraph]] = [[] for _ in range(size)]
        self._threads, connections = [], []
        for rank in range(1, size):
            ours, theirs = (Connection(end.detach()) for end in socket.socketpair())
            thread = threading.Thread(target=self._follow, args=(theirs, rank))
            thread.start()
            self._threads.append(thread)
            connections.append(ours)
        self.peers = Peers(connections)

    def new_graph(self, rank: int) -> RecordedGraph:
        self.graphs[rank].append(RecordedGraph())
        return self.graphs[rank][-1]

    def close(self) -> None:
        self.peers.close()
        for thread in self._threads:
            thread.join()

    def _follow(self, connection: Connection, rank: int) -> None:
        with connection:  # closed after a fault, so that rank 0 does not wait
            follow(connection, Rank(rank, lambda: self.new_graph(rank)))


@pytest.fixture(autouse=True)
def _sums_are_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Collectives, "sum", launched(Collectives.sum))


@pytest.fixture
def crew(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], ThreadedRanks]]:
    made: list[ThreadedRanks] = []

    def make(size: int) -> ThreadedRanks:
        made.append(ThreadedRanks(size))
        return made[-1]

    yield make
    for ranks in made:
        ranks.close()


def runner_of(
    checkpoint: Path,
    directory: Path,
    ranks: Ranks,
    new: Callable[[], Backend],
    dtype: torch.dtype,
    *,
    sums_in_order: bool = True,
) -> RankedRunner:
    """A runner that draws on its device, as on a GPU. Every rank has a backend of its own."""
    where = checkpoint, directory, ranks, SIZE, NUM_BLOCKS, dtype
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvops, "backend", lambda *_: new())
        runner = RankedRunner(*where, ops=new(), sums_in_order=sums_in_order)
    runner._inputs.is_copied = True
    return runner


def noted_exchanges(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[tuple[str, int]]]:
    """The exchanges of each rank from now on, with their numbers of values or rows."""
    found: dict[int, list[tuple[str, int]]] = {}

    def noted(name: str) -> None:
        exchange = getattr(Collectives, name)

        def note(self: Collectives, x: Tensor) -> Any:
            found.setdefault(self.rank, []).append(
                (name, len(x) if name == "join_logits" else x.numel())
            )
            return exchange(self, x)

        monkeypatch.setattr(Collectives, name, note)

    for name in ("sum", "broadcast", "join_logits"):
        noted(name)
    return found


def launched_kernels() -> Backend:
    return Backend(LaunchedKernels())


@pytest.mark.parametrize("sums_in_order", [True, False])
@pytest.mark.parametrize(("name", "size"), [("qwen3-gqa-tied", 2), ("qwen3-mha-bias", 4)])
def test_graphs_of_all_ranks_give_the_tokens_of_one(
    name: str,
    size: int,
    sums_in_order: bool,
    crew: Callable[[int], ThreadedRanks],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens are those of transformers. Each rank replays the same graphs as often, with its sums
    in them, in order or all-reduced; prefill steps between them are eager. All ranks exchange the
    same numbers of bytes in the same order: otherwise NCCL would hang."""
    checkpoint = make_checkpoint(tmp_path / "model", SPECS[name])
    ranks = crew(size)
    exchanges = noted_exchanges(monkeypatch)
    runner = runner_of(
        checkpoint, tmp_path, ranks, launched_kernels, torch.float32, sums_in_order=sums_in_order
    )
    runner.capture_graphs(MAX_ROWS, 0, lambda: ranks.new_graph(0))
    assert [len(graphs) for graphs in ranks.graphs] == [len(ladder(MAX_ROWS))] * size
    found = generate(runner, PROMPTS, [GREEDY] * len(PROMPTS))
    oracle = Oracle(checkpoint)
    for i, prompt in enumerate(PROMPTS):
        known = oracle.answer(prompt).token_ids
        assert found[i][: len(known)] == known[: len(found[i])]
    replays = [[graph.num_replays for graph in graphs] for graphs in ranks.graphs]
    assert sum(replays[0]) == 14 + 2  # prompts of one and of two tokens are decode steps too
    assert all(replays[0])
    assert replays == [replays[0]] * size
    assert sorted(exchanges) == list(range(size))
    assert {name for name, _ in exchanges[0]} == {"broadcast", "join_logits", "sum"}
    assert all(others == exchanges[0] for others in exchanges.values())


def test_each_rank_plans_attention_of_its_own_heads(
    crew: Callable[[int], ThreadedRanks], tmp_path: Path
) -> None:
    """FlashInfer plans on each rank's host, from lengths that rank 0 tells: eager steps and graphs
    give the tokens of kernels that need no plan."""
    checkpoint = make_checkpoint(tmp_path / "model", SPECS["mistral-window"])
    with planned_kernels() as planned:
        cases: list[tuple[Callable[[], Backend], bool]]
        cases, found = [(launched_kernels, False), (planned, False), (planned, True)], []
        for number, (new, has_graphs) in enumerate(cases):
            ranks = crew(2)
            folder = tmp_path / str(number)
            folder.mkdir()
            runner = runner_of(checkpoint, folder, ranks, new, torch.bfloat16)
            if has_graphs:
                runner.capture_graphs(MAX_ROWS, 0, lambda crew=ranks: crew.new_graph(0))  # type: ignore[misc]
            found.append(generate(runner, PROMPTS, [GREEDY] * len(PROMPTS)))
        assert found[1:] == [found[0]] * 2
        of_ranks: dict[Any, list[int]] = {}
        for one in planned.wrappers:
            if one.in_graph:
                of_ranks.setdefault(one.owner, []).append(len(one.buffers[3]))
        assert [sorted(rows) for rows in of_ranks.values()] == [ladder(MAX_ROWS)] * 2
        assert {wrapper.shape[:2] for wrapper in planned.wrappers} == {(2, 1)}


def test_a_rank_gives_up_its_graphs_with_the_arena(
    crew: Callable[[int], ThreadedRanks], tmp_path: Path
) -> None:
    """A graph knows the arena's address. A worker that joins another pool records again, and all
    ranks write there."""
    checkpoint = make_checkpoint(tmp_path / "model", SPECS["qwen3-gqa-tied"])
    ranks = crew(2)
    old = runner_of(checkpoint, tmp_path, ranks, launched_kernels, torch.float32)
    old.capture_graphs(2, 0, lambda: ranks.new_graph(0))
    ranks.leave()
    ranks.join([old.colder, old.membership], max_num_seqs=8)
    model, kv = old.model, old.colder.pool.kv
    new = Runner(model, kv, SIZE, old.ops, ranks.steps(model, kv, SIZE, old.ops))
    new.capture_graphs(2, 0, lambda: ranks.new_graph(0))
    new.launch([Row((1,), 0, [3], 0, (GREEDY,))]).result()
    ranks.leave()
    assert [graph.num_replays for graph in ranks.graphs[1]] == [0, 0, 0, 1]
    for rank in range(2):
        empty, written = (
            one.directory.arena(rank).read_bytes().strip(b"\xff")
            for one in (old.membership, old.colder)
        )
        assert not empty
        assert written
