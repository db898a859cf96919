"""An engine on a late device, between the launch of a step and its retirement. Blocks of 4."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from blockstore.errors import WorkerFenced
from blockstore.records import PoolSpec
from services.engine.batch import Fault
from services.engine.engine import Engine
from services.engine.messages import Admit, Command, StepOutcome
from services.engine.scheduler import Scheduler
from services.engine.sequences.beam_group import group_class
from services.engine.sequences.penalty_state import PenaltyState
from services.engine.sequences.sequence import Rules
from services.protocol.ticket import FinishReason, GroupState, Ticket
from tests.late_device import LateForward

from .fakes import PROMPT, Arena, FakeForward, asked, make_stamps, right

SIZE = 4
KEY = "h-r1"


class EchoGrammar:
    """A grammar whose mask names the tokens that it has seen."""

    def walk(self) -> "EchoGrammar":
        return self

    def mask_after(self, tokens: Sequence[int], num_drafts: int) -> NDArray[np.int32]:
        return np.array(tokens, np.int32)


class Host:
    """A decode engine, or a prefill engine if `one_token`, on a late device."""

    def __init__(self, directory: Path, budget: int = 64, *, one_token: bool = False) -> None:
        spec = PoolSpec("pool", "model", "fingerprint", 64, SIZE, block_bytes=1)
        self.stamps = make_stamps(directory / "stamps", spec)
        self.stamps.mark_owned(range(spec.num_blocks), KEY)
        self.model = FakeForward(Arena(SIZE, self.stamps))
        self.device = LateForward(self.model)
        self.engine = Engine(
            self.device,
            Scheduler(budget, 64),
            self.stamps,
            look_ahead=2,
            check_fence=self.check_fence,
        )
        self.one_token = one_token
        self.is_fenced = False

    def check_fence(self) -> None:
        if self.is_fenced:
            raise WorkerFenced

    def admit(self, asked: Ticket, num_blocks: int = 20, first: int = 0) -> Admit:
        grammar: Any = None if asked.sampling.structure is None else EchoGrammar()
        rules = Rules.of(asked, SIZE, frozenset(), max_model_len=1000, grammar=grammar)
        blocks = range(first, first + num_blocks)
        group = group_class(asked).to_compute(asked, rules, blocks)
        if self.one_token:
            group.stop_after_draws()
        return Admit(group)

    def step(self, *commands: Command) -> StepOutcome:
        return self.engine.step(commands)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def drawn(outcome: StepOutcome) -> tuple[int, ...]:
    outputs = (one for advance in outcome.advances for one in advance.outputs)
    return tuple(token for one in outputs for token in one.token_ids)


def test_a_step_is_launched_before_the_one_before_it_is_retired(host: Host) -> None:
    """From the second step on, each takes a token that the host does not have."""
    first = host.step(host.admit(asked(max_tokens=4)))
    assert (first.advances, first.is_busy) == ((), True)
    for number in range(3):
        assert len(host.device.flights) == 1
        assert drawn(host.step()) == right(0, 4)[number : number + 1]
    assert host.device.num_ahead == 3
    last = host.step()
    assert drawn(last) == right(0, 4)[3:]
    assert last.advances[0].remaining == GroupState(())
    assert not host.device.flights
    assert not host.step().is_busy


def test_a_block_is_stamped_when_its_step_is_retired(tmp_path: Path) -> None:
    """Also by a step without draws: 8 of 10 tokens."""
    host = Host(tmp_path, budget=8, one_token=True)
    host.step(host.admit(asked(), 3))
    assert not host.stamps.is_committed(0)
    assert host.device.flights[0].rows[0].draws == ()
    outcome = host.step()
    assert [block_id for block_id, _ in outcome.advances[0].completed] == [0, 1]
    assert host.stamps.is_committed(0)
    assert host.stamps.is_committed(1)


def test_a_stopped_sequence_draws_no_second_token(tmp_path: Path) -> None:
    """A prefill worker's ticket waits for no other step."""
    host = Host(tmp_path, one_token=True)
    host.step(host.admit(asked(2), 5))
    (advance,) = host.step().advances
    assert advance.remaining is not None
    assert [state.token_ids for state in advance.remaining.sequences] == [right(0, 1), right(1, 1)]
    assert host.device.num_ahead == 0


def test_a_sequence_that_ends_keeps_its_blocks_while_it_is_in_flight(host: Host) -> None:
    """Its last token is a stop token, which only the host recognizes; the token after it is
    dropped."""
    host.step(host.admit(asked(stop_token_ids=right(0, 3)[-1:])))
    host.step()
    host.step()
    (advance,) = host.step().advances
    assert advance.outputs[0].finish_reason is FinishReason.STOP
    assert (advance.remaining, advance.freed) == (None, [])
    assert host.device.block_ids
    (advance,) = host.step().advances
    assert (advance.outputs, advance.remaining) == ([], GroupState(()))
    assert not host.device.block_ids


def test_a_broken_group_fails_when_nothing_of_it_is_in_flight(host: Host) -> None:
    """Only then do its blocks leave the prefix index and the holder."""
    host.model.poison = right(0, 2)[-1]
    host.step(host.admit(asked()))
    for _ in range(3):
        outcome = host.step()
        assert not any(advance.fault for advance in outcome.advances)
    assert host.device.block_ids  # the step behind the broken one
    (failed,) = host.step().advances
    assert failed.fault is Fault.NOT_FINITE
    assert {block_id for block_id, _ in failed.broken} == {0, 1}
    assert not host.device.block_ids
    assert host.step().advances == ()


def test_a_fault_after_the_last_token_is_ignored(host: Host) -> None:
    """The step that ran ahead of a stop token reads that token; its result is not used."""
    host.model.poison = right(0, 2)[-1]
    host.step(host.admit(asked(stop_token_ids=right(0, 2)[-1:])))
    outcomes = [host.step() for _ in range(4)]
    assert sum(map(drawn, outcomes), ()) == right(0, 2)
    assert not any(one.fault for outcome in outcomes for one in outcome.advances)
    assert outcomes[-2].advances[0].remaining == GroupState(())


@pytest.mark.parametrize("changes", [{"repetition_penalty": 1.2}, {"min_tokens": 3}])
def test_a_draw_that_depends_on_the_token_in_flight_is_made_from_it(
    host: Host, changes: dict[str, Any]
) -> None:
    """Its adjustment is the one that it has if each step waits for the one before."""
    asked_for = asked(max_tokens=6, stop_token_ids=(7,), **changes)
    rules = Rules.of(asked_for, SIZE, frozenset(), max_model_len=1000)
    host.step(host.admit(asked_for))
    tokens = list(PROMPT)
    for _ in range(5):
        (row,) = host.device.flights[-1].rows
        state = PenaltyState(rules.sampling, tokens, len(PROMPT), rules.end_ids)
        (found,), wanted = [draw.adjustment for draw in row.draws], state.adjustment()
        assert (found is None) is (wanted is None)
        if found is not None and wanted is not None:
            assert sorted(zip(found.seen, found.counts, strict=True)) == sorted(
                zip(wanted.seen, wanted.counts, strict=True)
            )
            assert found.banned.tolist() == wanted.banned.tolist()
        tokens += drawn(host.step())


def test_an_engine_that_ends_waits_for_its_device(host: Host) -> None:
    host.step(host.admit(asked()))
    host.step()
    num_steps = host.model.num_steps
    host.engine.settle()
    assert host.model.num_steps == num_steps + 1
    assert not host.device.flights


def test_a_fenced_engine_launches_nothing(host: Host) -> None:
    """Its blocks may belong to another worker by then."""
    host.is_fenced = True
    with pytest.raises(WorkerFenced):
        host.step(host.admit(asked()))
    assert not host.device.flights
    assert host.model.num_steps == 0


def test_results_of_a_step_during_which_it_was_fenced_are_dropped(host: Host) -> None:
    """The device writes until the end of the step, so the engine waits for it."""
    host.step(host.admit(asked()))
    host.step()
    host.is_fenced = True
    with pytest.raises(WorkerFenced):
        host.step()
    host.engine.settle()
    assert not host.device.flights
