"""Sequences of a group get, bit by bit, what each gets alone (law 10), from real kernels."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch

from bench.make_checkpoint import make_checkpoint
from blockstore.records import PoolSpec
from services.common.pool.stamps import Stamps, record_bytes
from services.engine.engine import Engine
from services.engine.messages import AddBlocks, Admit, Command
from services.engine.scheduler import Scheduler
from services.engine.sequences.group import Group
from services.engine.sequences.sequence import Rules
from services.protocol.block_keys import ComputedBlocks, num_blocks_for
from services.protocol.ticket import SamplingParams, Ticket, TicketSequence
from tests.late_device import DEVICES, Device

from .models_oracle import RecordingRunner, random_prompt

SIZE = 4
NUM_BLOCKS = 512
SAMPLED = SamplingParams(1.5, 0, 0.95, 0.0, seed=7, max_tokens=10)
GREEDY = replace(SAMPLED, temperature=0.0)


class EnginePair:
    """A prefill and a decode engine on one arena, whose blocks are each given out once."""

    def __init__(
        self, directory: Path, checkpoint: Path, dtype: torch.dtype, device: Device
    ) -> None:
        self._device = device
        self._recording = RecordingRunner(checkpoint, SIZE, NUM_BLOCKS, dtype=dtype)
        path = directory / f"stamps-{id(self)}"
        path.write_bytes(bytes(NUM_BLOCKS * record_bytes(SIZE)))
        spec = PoolSpec("pool", "model", "fingerprint", NUM_BLOCKS, SIZE, block_bytes=1)
        self._stamps = Stamps(path, spec.num_blocks, SIZE)
        self._blocks = iter(range(NUM_BLOCKS))
        self._keys = count()
        self.cached: tuple[int, ...] = ()

    def generate(self, asked: Ticket, chunk: int = 64) -> dict[int, list[int]]:
        """The tokens of each sequence. `cached`: blocks with the beginning of the prompt."""
        asked = replace(asked, holder_id=f"h{next(self._keys)}")
        num_new = num_blocks_for(asked, SIZE) - len(self.cached)
        new = self._take(num_new, asked.holder_id)
        computed = [ComputedBlocks.of_full(self.cached, SIZE)] * len(asked.sequences)
        computing = Group.to_compute(asked, _rules(asked), new, computed)
        found: dict[int, list[int]] = {s.index: list(s.token_ids) for s in asked.sequences}
        left = self._run(self._engine(chunk, one_token=True), [Admit(computing)], found)
        if left:
            in_tables = {block for state in left for block in state.block_ids}
            spare = [b for b in new if b not in in_tables and not self._stamps.is_committed(b)]
            detached = replace(asked, sequences=left)
            group = Group.to_continue(detached, _rules(asked), spare, len(self.cached) + num_new)
            assert group.is_stamped(self._stamps)
            self._run(self._engine(64, one_token=False), [Admit(group)], found)
        return found

    def _run(
        self, engine: Engine, commands: list[Command], found: dict[int, list[int]]
    ) -> tuple[TicketSequence, ...]:
        acquired = 0
        while True:
            outcome, commands = engine.step(commands), []
            if not outcome.advances:
                assert outcome.is_busy
                continue
            (advance,) = outcome.advances
            for token in advance.tokens:
                found[token.index].append(token.token)
            if advance.remaining is not None:
                return advance.remaining
            if advance.wanted_blocks:
                group = engine._scheduler.get(advance.key)
                assert group is not None
                acquired = advance.wanted_blocks - group.num_acquired
                commands = [AddBlocks(advance.key, self._take(acquired, advance.key))]

    def _engine(self, budget: int, *, one_token: bool) -> Engine:
        scheduler = Scheduler(budget, max_num_seqs=64)
        forward = self._device(self._recording)
        return Engine(forward, scheduler, self._stamps, one_token=one_token, look_ahead=3)

    def _take(self, num_blocks: int, owner: str) -> tuple[int, ...]:
        taken = tuple(next(self._blocks) for _ in range(num_blocks))
        self._stamps.mark_owned(taken, owner)
        return taken


def _rules(asked: Ticket) -> Rules:
    return Rules.of(asked, SIZE, frozenset(), max_model_len=200)


def _asked(prompt: Sequence[int], indices: Sequence[int], sampling: SamplingParams) -> Ticket:
    return Ticket(
        *("r", 1, 1, "pool", "h", 1, bytes(16), tuple(prompt), sampling),
        sequences=tuple(TicketSequence(index) for index in indices),
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("length", [1, 8, 21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sequence_of_a_group_is_the_one_that_runs_alone(
    tmp_path: Path,
    checkpoint: Path,
    dtype: torch.dtype,
    length: int,
    sampling: SamplingParams,
    device: str,
) -> None:
    """In any chunks, with and without a cached prompt."""
    prompt = random_prompt(length, seed=length)
    engine_pair = EnginePair(tmp_path, checkpoint, dtype, DEVICES[device])
    alone = {i: engine_pair.generate(_asked(prompt, [i], sampling))[i] for i in range(5)}
    assert len({tuple(tokens) for tokens in alone.values()}) == (5 if sampling is SAMPLED else 1)
    for chunk in (1, 5, 64):
        assert engine_pair.generate(_asked(prompt, range(5), sampling), chunk) == alone
    engine_pair.cached = tuple(range(length // SIZE))  # of the first that ran alone
    assert engine_pair.generate(_asked(prompt, range(5), sampling)) == alone


@pytest.mark.parametrize("device", DEVICES)
def test_a_group_that_is_computed_again_goes_on_as_it_would_have(
    tmp_path: Path, checkpoint: Path, device: str
) -> None:
    """After some, none or almost all of the tokens."""
    prompt = random_prompt(10, seed=3)
    engine_pair = EnginePair(tmp_path, checkpoint, torch.float32, DEVICES[device])
    whole = engine_pair.generate(_asked(prompt, range(4), SAMPLED))
    states = [TicketSequence(i, tuple(whole[i][:num])) for i, num in {0: 4, 1: 0, 3: 9}.items()]
    for chunk in (1, 6, 64):
        again = replace(_asked(prompt, [0], SAMPLED), sequences=tuple(states))
        assert engine_pair.generate(again, chunk) == {i: whole[i] for i in (0, 1, 3)}
