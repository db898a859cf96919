"""Steps on lanes that are lent and taken back while they run: the same bits, and nothing hangs."""

import os
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.make_checkpoint import make_checkpoint
from kvops.native import Lane, NativeCpu, wake
from services.engine.batch import Answer, Fault, Query, Row

from .models_oracle import GREEDY, Rig, random_prompt

NUM_OWNERS = 4
NUM_STEPS = 400

pytestmark = pytest.mark.timeout(180, method="thread")  # a hang would be in native code


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough that every loop has several pieces."""
    return make_checkpoint(
        tmp_path_factory.mktemp("wide"), hidden_size=256, intermediate_size=512, vocab_size=2048
    )


def rows() -> list[Row]:
    """Two prompts, and eight rows of one token that see 32 positions of the first one."""
    prompts = [
        Row(random_prompt(33, seed=i), 0, range(4 * i, 4 * i + 3), draws=(GREEDY,))
        for i in range(2)
    ]
    return prompts + [Row([i], 32, range(3), store_from=33, draws=(GREEDY,)) for i in range(8)]


DRAWN = replace(GREEDY, sampling=replace(GREEDY.sampling, temperature=1.0, top_p=0.9))
QUERIES = [
    Query(state, (GREEDY, DRAWN)[state % 2], 33, num_top=(None, None, 3)[state % 3])
    for state in range(10)
]


class Bench:
    """A rig whose lanes change, and what it computes on one lane."""

    def __init__(self, checkpoint: Path) -> None:
        self.rig = Rig(checkpoint, block_size=16, num_blocks=8)
        native = self.rig.ops.native
        assert native is not None
        self.native: NativeCpu = native
        self.board = torch.zeros(NUM_OWNERS, dtype=torch.int32)
        self.rig.run(rows())
        self.expected = self.step()

    def assign(self, lanes: list[Lane]) -> None:
        self.native.assign(lanes, self.board)

    def step(self) -> tuple[Tensor, list[Answer | Fault]]:
        """Logits, and what else is asked of the states, which are other loops over the head."""
        hidden = self.rig.hidden(rows())
        return self.rig.last_logits, self.rig._model.answer(hidden, QUERIES)

    def check(self) -> None:
        (logits, answers), (expected, expected_answers) = self.step(), self.expected
        assert torch.equal(logits, expected)
        assert answers == expected_answers


@pytest.fixture
def bench(checkpoint: Path) -> Bench:
    return Bench(checkpoint)


@contextmanager
def flipping(board: Tensor) -> Iterator[None]:
    """Owners get busy and idle at random, as often as another thread can."""
    stop = threading.Event()
    view = board.numpy()

    def flip() -> None:
        draw = random.Random(0)
        while not stop.is_set():
            owner = draw.randrange(NUM_OWNERS)
            view[owner] = draw.randrange(2)
            wake(board, owner)

    thread = threading.Thread(target=flip)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(before)


@pytest.mark.parametrize("num_lanes", [1, 2, 4])
def test_lanes_that_stay_compute_the_same(bench: Bench, num_lanes: int) -> None:
    bench.assign([Lane()] * num_lanes)
    for _ in range(20):
        bench.check()


@pytest.mark.parametrize("num_lent", [1, 3, 7])
def test_lanes_that_are_lent_and_taken_back_compute_the_same(bench: Bench, num_lent: int) -> None:
    lent = [Lane(owners=tuple({i % NUM_OWNERS, i * 3 % NUM_OWNERS})) for i in range(num_lent)]
    bench.assign([Lane(), *lent])
    with flipping(bench.board):
        for _ in range(NUM_STEPS):
            bench.check()


def test_own_and_lent_lanes_together_compute_the_same(bench: Bench) -> None:
    bench.assign([Lane(), Lane(), Lane(owners=(0,)), Lane(owners=(1, 2))])
    with flipping(bench.board):
        for _ in range(NUM_STEPS):
            bench.check()


def test_lanes_that_change_between_steps_compute_the_same(bench: Bench) -> None:
    draw = random.Random(1)
    with flipping(bench.board):
        for _ in range(NUM_STEPS):
            own = [Lane() for _ in range(draw.randint(1, 2))]
            lent = [Lane(owners=(draw.randrange(NUM_OWNERS),)) for _ in range(draw.randrange(4))]
            bench.assign([*own, *lent])
            bench.check()


def test_a_lane_whose_owners_are_busy_takes_no_part(bench: Bench) -> None:
    """Its buffers are there, so that it can begin at any time."""
    bench.board[1] = 1
    bench.assign([Lane(), Lane(owners=(0, 1))])
    assert bench.native.num_lanes == 2
    bench.check()
    bench.board[1] = 0
    bench.check()


def test_a_lane_is_pinned_to_its_cpu(bench: Bench) -> None:
    """The calling thread is the first lane."""
    before = os.sched_getaffinity(0)
    cpu = max(before)
    try:
        bench.assign([Lane(cpu)])
        bench.check()
        assert os.sched_getaffinity(0) == {cpu}
    finally:
        os.sched_setaffinity(0, before)
