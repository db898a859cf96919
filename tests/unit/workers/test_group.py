"""Groups in an engine: shared, copied, written and released blocks. Blocks of 4."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from blockstore.records import PoolSpec
from services.engine.batch import Draw
from services.engine.engine import Engine
from services.engine.messages import AbortSequence, Admit, Command, Remove, StepOutcome
from services.engine.scheduler import Scheduler
from services.engine.sequences.group import Group
from services.engine.sequences.results import Advance
from services.engine.sequences.sequence import Rules
from services.protocol.block_keys import BlockKeys, ComputedBlocks, num_blocks_for, num_tokens_of
from services.protocol.ticket import Ticket, TicketSequence

from .fakes import PROMPT, Arena, FakeForward, asked, make_stamps, next_token, right

SIZE = 4
KEY = "h-r1"


class EnginePair:
    """Two engines on one arena: `prefill` and `decode`, whose sequences look 2 tokens ahead."""

    def __init__(self, directory: Path, budget: int = 64) -> None:
        spec = PoolSpec("pool", "model", "fingerprint", 64, SIZE, block_bytes=1)
        self.stamps = make_stamps(directory / "stamps", spec)
        self.stamps.mark_owned(range(spec.num_blocks), KEY)
        self.arena = Arena(SIZE, self.stamps)
        self.model = FakeForward(self.arena)
        self.prefill, self.decode = self._engine(budget), self._engine(budget)

    def _engine(self, budget: int) -> Engine:
        scheduler = Scheduler(budget, max_num_seqs=64)
        return Engine(self.model, scheduler, self.stamps, look_ahead=2)

    def prefilled(self, asked: Ticket, block_ids: Sequence[int]) -> tuple[Ticket, list[Advance]]:
        """The ticket at rest, and the outcomes of all steps."""
        group = Group.to_compute(asked, rules(asked), block_ids)
        group.stop_after_draws()
        commands: list[Command] = [Admit(group)]
        advances: list[Advance] = []
        for _ in range(100):
            advances += self.prefill.step(commands).advances
            commands = []
            if (left := advances[-1].remaining) is not None:
                return asked.with_group(left), advances
        raise AssertionError("it does not end")

    def admit(self, detached: Ticket, spare: Sequence[int], num_acquired: int) -> StepOutcome:
        group = Group.to_continue(detached, rules(detached), spare, num_acquired)
        assert group.is_stamped(self.stamps)
        return self.decode.step([Admit(group)])

    def removed(self) -> tuple[TicketSequence, ...]:
        (removed,) = self.decode.step([Remove(KEY)]).advances
        assert removed.remaining is not None
        return removed.remaining.sequences


@pytest.fixture
def engine_pair(tmp_path: Path) -> EnginePair:
    return EnginePair(tmp_path)


def rules(asked: Ticket) -> Rules:
    return Rules.of(asked, SIZE, frozenset(), max_model_len=1000)


def tables(sequences: Sequence[TicketSequence]) -> dict[int, tuple[int, ...]]:
    return {state.index: state.block_ids for state in sequences}


def test_a_shared_tail_is_copied_before_it_is_written(engine_pair: EnginePair) -> None:
    """For all but the last sequence that refers to it, by index, in one call; then each continues
    alone."""
    detached, _ = engine_pair.prefilled(asked(3), range(5))
    outcome = engine_pair.admit(detached, spare=(3, 4), num_acquired=5)
    assert (engine_pair.model.num_copies, engine_pair.arena.num_copied) == (1, 2)
    drawn = [one.token_ids for one in outcome.advances[0].outputs]
    assert drawn == [(right(i, 2)[1],) for i in range(3)]
    # 12 tokens and 2 ahead: one more block for each
    assert outcome.advances[0].wanted_blocks == 5 + 3
    assert tables(engine_pair.removed()) == {0: (0, 1, 3), 1: (0, 1, 4), 2: (0, 1, 2)}


def test_the_last_user_of_a_shared_tail_writes_it_in_place(engine_pair: EnginePair) -> None:
    """No block has come for a copy, and none is needed any more."""
    detached, _ = engine_pair.prefilled(asked(2), range(4))
    engine_pair.admit(detached, spare=(), num_acquired=3)
    (advance,) = engine_pair.decode.step([AbortSequence(KEY, 0)]).advances
    assert [one.index for one in advance.outputs] == [1]
    assert engine_pair.arena.num_copied == 0
    assert tables(engine_pair.removed()) == {1: (0, 1, 2)}


# Computed again: sequences with tokens of their own behind the prompt.

AGAIN = {0: 3, 1: 0, 3: 9}
"""How many tokens each sequence has; 2 has ended."""


def again(prompt: Sequence[int] = PROMPT) -> Ticket:
    states = tuple(TicketSequence(i, right(i, num, prompt)) for i, num in AGAIN.items())
    return replace(asked(1, prompt=prompt), sequences=states)


def test_tokens_common_to_all_are_computed_once() -> None:
    """Greedy tokens, or a token that all sequences drew."""
    states = [(5, 6, 7), (5, 6), (5, 6, 8, 9)]
    group = replace(
        asked(1), sequences=tuple(TicketSequence(i, own) for i, own in enumerate(states))
    )
    assert BlockKeys.of(group, 1).trunk.token_ids == (*PROMPT, 5, 6)
    assert num_tokens_of(group) == 12 + 1 + 0 + 2
    assert num_blocks_for(group, SIZE) == 3 + 3 * 1  # 12 full; then 13, 12 and 14 and one more


def test_tokens_common_to_some_are_computed_once_too(engine_pair: EnginePair) -> None:
    """Beams that part late: 14 tokens are common to two of them, and the third parts after 10."""
    own = [(5, 6, 7, 8, 9), (2,), (5, 6, 7, 8, 1)]
    states = tuple(TicketSequence(i, tokens) for i, tokens in enumerate(own))
    wanted = replace(asked(1), sequences=states)
    assert num_tokens_of(wanted) == 10 + 4 + 1 + 1 + 1
    assert num_blocks_for(wanted, SIZE) == 3 + 3 * 1  # one more full one that two have
    detached, _ = engine_pair.prefilled(wanted, range(6))
    assert engine_pair.arena.num_computed == 17
    for index, tokens in enumerate(own):
        drawn = next_token((*PROMPT, *tokens), Draw(wanted.sampling, index))
        assert detached.sequences[index].token_ids == (*tokens, drawn)
    first, second, third = tables(detached.sequences).values()
    assert first[:3] == third[:3]
    assert first[:2] == second[:2]
    assert len({first[3], third[3], second[2], first[2]}) == 4


def test_an_adopted_block_is_not_copied_for_its_last_token(engine_pair: EnginePair) -> None:
    """0 ends where an adopted block ends, which 1 has too: its last token is computed again, and
    not stored (law 2)."""
    states = TicketSequence(0, (5, 6)), TicketSequence(1, (5, 6, 7))
    wanted = replace(asked(1), sequences=states)
    whole, _ = engine_pair.prefilled(replace(wanted, sequences=states[1:]), range(20, 25))
    adopted = whole.sequences[0].block_ids[:3]
    computed = [ComputedBlocks(adopted, 11, 3), ComputedBlocks.of_full(adopted, SIZE)]
    group = Group.to_compute(wanted, rules(wanted), (30, 31), computed)
    group.stop_after_draws()
    num_copied = engine_pair.arena.num_copied
    (advance,) = engine_pair.prefill.step([Admit(group)]).advances
    assert advance.remaining is not None
    assert tables(advance.remaining.sequences) == {0: (*adopted, 31), 1: (*adopted, 30)}
    assert engine_pair.arena.num_copied == num_copied
