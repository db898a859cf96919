"""Steps on lanes that are lent and taken back while they run: the bits are the same, and nothing
hangs."""

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
from services.engine.batch import Row
from tests.draws import batch_of
from tests.examples import examples

from .models_oracle import GREEDY, RecordingRunner, random_prompt

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
    """Two prompts, and eight rows of one token that read 32 positions of the first prompt."""
    prompts = [
        Row(random_prompt(33, seed=i), 0, range(4 * i, 4 * i + 3), draws=(GREEDY,))
        for i in range(2)
    ]
    return prompts + [Row([i], 32, range(3), store_from=33, draws=(GREEDY,)) for i in range(8)]


DRAWN = replace(GREEDY, sampling=replace(GREEDY.sampling, temperature=1.0, top_p=0.9))
TOLD = replace(DRAWN, sampling=replace(DRAWN.sampling, logprobs=3))


class ChangingLanes:
    """A recording whose lanes change, and its results on one lane."""

    def __init__(self, checkpoint: Path) -> None:
        self.recording = RecordingRunner(checkpoint, block_size=16, num_blocks=8)
        native = self.recording.ops.native
        assert native is not None
        self.native: NativeCpu = native
        self.board = torch.zeros(NUM_OWNERS, dtype=torch.int32)
        self.recording.run(rows())
        self.expected = self.step()

    def assign(self, lanes: list[Lane]) -> None:
        self.native.assign(lanes, self.board)

    def step(self) -> list[Tensor]:
        """The logits, and results of the other loops over the head."""
        hidden = self.recording.hidden(rows())
        batch = batch_of([(GREEDY, DRAWN, TOLD)[state % 3] for state in range(10)], [33] * 10)
        drawn = self.recording.model.draw(hidden, batch, [None] * 10)
        return [self.recording.last_logits, *drawn]

    def check(self) -> None:
        for found, expected in zip(self.step(), self.expected, strict=True):
            assert torch.equal(found, expected)


@pytest.fixture
def changing(checkpoint: Path) -> ChangingLanes:
    return ChangingLanes(checkpoint)


@contextmanager
def flipping(board: Tensor) -> Iterator[None]:
    """The owners of the lanes become busy and idle at random, as fast as another thread can."""
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
def test_unchanged_lanes_compute_the_same(changing: ChangingLanes, num_lanes: int) -> None:
    changing.assign([Lane()] * num_lanes)
    for _ in range(20):
        changing.check()


@pytest.mark.parametrize("num_lanes", [64, 128])
def test_many_more_lanes_than_cpus_compute_the_same(
    changing: ChangingLanes, num_lanes: int
) -> None:
    """The lanes belong to several groups; half of them are lent and taken back while they run."""
    changing.assign([Lane()] * num_lanes)
    changing.check()
    lent = [Lane(owners=(i % NUM_OWNERS,)) for i in range(num_lanes // 2)]
    changing.assign([Lane()] * (num_lanes // 2) + lent)
    with flipping(changing.board):
        for _ in range(3):
            changing.check()


@pytest.mark.parametrize("num_lent", [1, 3, 7])
def test_lanes_that_are_lent_and_taken_back_compute_the_same(
    changing: ChangingLanes, num_lent: int
) -> None:
    lent = [Lane(owners=tuple({i % NUM_OWNERS, i * 3 % NUM_OWNERS})) for i in range(num_lent)]
    changing.assign([Lane(), *lent])
    with flipping(changing.board):
        for _ in range(examples(NUM_STEPS)):
            changing.check()


def test_own_and_lent_lanes_together_compute_the_same(changing: ChangingLanes) -> None:
    changing.assign([Lane(), Lane(), Lane(owners=(0,)), Lane(owners=(1, 2))])
    with flipping(changing.board):
        for _ in range(examples(NUM_STEPS)):
            changing.check()


def test_lanes_that_change_between_steps_compute_the_same(changing: ChangingLanes) -> None:
    draw = random.Random(1)
    with flipping(changing.board):
        for _ in range(examples(NUM_STEPS)):
            own = [Lane() for _ in range(draw.randint(1, 2))]
            lent = [Lane(owners=(draw.randrange(NUM_OWNERS),)) for _ in range(draw.randrange(4))]
            changing.assign([*own, *lent])
            changing.check()


def test_the_decoder_has_seven_barriers_a_layer_and_three(checkpoint: Path) -> None:
    """Norm, linear with rotation, attention, linear, norm, linear, linear; and once the embedding,
    the final norm and the end. The recording adds logits: a linear and an end. The number does not
    depend on lanes and rows."""
    recording = RecordingRunner(checkpoint, block_size=16, num_blocks=8)
    native = recording.ops.native
    assert native is not None
    for number in (1, 2, 3):
        native.assign([Lane()] * number)
        before = native.pool.num_loops
        recording.hidden([Row([i], 0, [i], draws=(GREEDY,)) for i in range(number)])
        num_layers = recording.model.config.num_layers
        assert native.pool.num_loops - before == 7 * num_layers + 3 + 2


def test_a_lane_whose_owners_are_busy_takes_no_part(changing: ChangingLanes) -> None:
    """Its buffers exist, so that it can begin at any time."""
    changing.board[1] = 1
    changing.assign([Lane(), Lane(owners=(0, 1))])
    assert changing.native.num_lanes == 2
    changing.check()
    changing.board[1] = 0
    changing.check()


def test_a_lane_is_pinned_to_its_cpu(changing: ChangingLanes) -> None:
    """The calling thread is the first lane."""
    before = os.sched_getaffinity(0)
    cpu = max(before)
    try:
        changing.assign([Lane(cpu)])
        changing.check()
        assert os.sched_getaffinity(0) == {cpu}
    finally:
        os.sched_setaffinity(0, before)
