"""Speculation: which rows may get drafts, and what a step does with them. Blocks of 4."""

from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from blockstore.records import PoolSpec
from quire.types import Beam
from services.engine.batch import Draw, Fault, LoadedAdapter
from services.engine.engine import Engine
from services.engine.forward import ForwardPass
from services.engine.messages import AddBlocks, Admit, Command, StepOutcome
from services.engine.scheduler import ScheduledSequence, Scheduler
from services.engine.sequences.group import Group
from services.engine.sequences.penalty_state import PenaltyState
from services.engine.sequences.sequence import Rules, Sequence
from services.engine.speculation.ngram import NgramDrafter
from services.engine.speculation.payoff import Payoff
from services.engine.speculation.speculation import Speculation
from services.protocol.ticket import FinishReason, Ticket, TicketSequence
from tests.drafting import oracle
from tests.late_device import Device

from .conftest import MakePair
from .fakes import PROMPT, SAMPLED, Arena, FakeForward, expected, make_stamps, next_token, ticket
from .runs import finished, outputs, start
from .sequences import KEY, SIZE, sequence

# ── which rows ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("changes", "number"),
    [
        ({}, 99),  # max_tokens: 100, of which a step with 99 drafts draws all
        ({"logprobs": 3}, 99),
        ({"num_blocks": 3}, 2),  # 12 slots
        ({"num_blocks": 2}, -2),  # not even one for its last token
        ({"repetition_penalty": 1.2}, 99),
        ({"min_tokens": 3}, 99),
        ({"beam": Beam(2)}, 0),
    ],
)
def test_how_many_drafts_a_sequence_may_get(changes: dict[str, Any], number: int) -> None:
    assert sequence(PROMPT, **changes).num_draftable == number


def test_draws_behind_drafts_are_adjusted_as_if_the_drafts_were_tokens() -> None:
    """Afterwards the sequence's own state is as before, so that its next draws are right."""
    changes: dict[str, Any] = {
        "repetition_penalty": 1.5,
        "frequency_penalty": 1.0,
        "bad_words": ((8, 9, 3), (2,)),
        "min_tokens": 4,
        "stop_token_ids": (7,),
    }
    one, logits = sequence([1, 5, 8], **changes), torch.linspace(-2, 2, 12)
    rules = replace(one.rules, num_prompt_tokens=2)

    def state(tokens: Seq[int]) -> PenaltyState:
        return PenaltyState(rules.sampling, list(tokens), 2, rules.end_ids)

    tokens = [1, 5, 8]
    own = PenaltyState(rules.sampling, tokens, 2, rules.end_ids)
    for new, drafts in ((9, (9, 3, 9)), (8, (8, 8)), (9, (1, 9, 9, 5))):
        found = own.adjustments(drafts)
        for number, adjustment in enumerate(found):
            alone = state([*tokens, *drafts[:number]]).adjustment()
            assert adjustment is not None
            assert alone is not None
            assert adjustment.applied(logits).tolist() == alone.applied(logits).tolist()
        tokens.append(new)


def test_drafts_are_verified_with_the_adapter_of_their_sequence() -> None:
    adapter = LoadedAdapter("d1", None)
    one = sequence(PROMPT)
    one.rules = replace(one.rules, adapter=adapter)
    row = one.launch(1, (5, 6))
    assert (row.adapter, row.num_drafts, len(row.draws)) == (adapter, 2, 3)


def test_no_draft_ends_the_text() -> None:
    """Nothing is drawn after an end, and a grammar has no state after it."""
    speculation = oracle(lambda one, tokens: len(tokens), 8, 0)
    one = sequence([1, 2, 3], stop_token_ids=(6,))
    nobody = cast("Group", SimpleNamespace(one_token=False))
    (scheduled,), _ = speculation.with_drafts([ScheduledSequence(nobody, one, 1)], 64)
    assert scheduled.drafts == (3, 4, 5)


def test_a_row_gets_the_drafts_that_its_drafter_finds_likely() -> None:
    """Of two rows, only one repeats what it has had; later the other does."""
    payoff, nobody = Payoff(), cast("Group", SimpleNamespace(one_token=False))
    for _ in range(2):
        payoff.measured(2, 0, 0, 1.0)
    speculation = Speculation(NgramDrafter(1, 5), 8, payoff)
    rows = [sequence([1, 2, 3, 4, 5, 6, 1, 2, 3, 4]), sequence([1, 2, 3])]
    batch = [ScheduledSequence(nobody, one, 1) for one in rows]
    assert [one.drafts for one in speculation.with_drafts(batch, 64)[0]] == [(5, 6), ()]
    rows[0].tokens, rows[1].tokens = [*rows[0].tokens, 9], [1, 2, 3, 1, 2]
    for one in rows:
        one.num_computed = one.num_launched = len(one.tokens) - 1
    assert [one.drafts for one in speculation.with_drafts(batch, 64)[0]] == [(), (3, 1)]


# ── what a step does ─────────────────────────────────────────────────────────────────────────────


def drawn_next(one: Sequence, tokens: list[int]) -> int:
    return next_token(tokens, Draw(SAMPLED, one.index))


class Host:
    """A decode engine whose drafts are right, except one of `wrong_every`."""

    def __init__(
        self, directory: Path, device: Device, num_drafts: int, wrong_every: int, budget: int = 64
    ) -> None:
        spec = PoolSpec("pool", "model", "fingerprint", 64, SIZE, block_bytes=1)
        self.stamps = make_stamps(directory / "stamps", spec)
        self.stamps.mark_owned(range(spec.num_blocks), KEY)
        self.model = FakeForward(Arena(SIZE, self.stamps))
        self.device: ForwardPass = device(self.model)
        self.engine = Engine(
            self.device,
            Scheduler(budget, 64),
            self.stamps,
            look_ahead=2,
            speculation=oracle(drawn_next, num_drafts, wrong_every),
        )

    def run(self, asked: Ticket) -> list[StepOutcome]:
        """All steps until the group has left. It gets the blocks that it asks for, in order."""
        rules = Rules.of(asked, SIZE, frozenset(), max_model_len=1000)
        self.group = Group.to_compute(asked, rules, range(3))
        commands: list[Command] = [Admit(self.group)]
        outcomes: list[StepOutcome] = []
        while not outcomes or outcomes[-1].is_busy:
            outcomes.append(self.engine.step(commands))
            commands = []
            for advance in outcomes[-1].advances:
                if (wanted := advance.wanted_blocks) > self.group.num_acquired:
                    blocks = tuple(range(self.group.num_acquired, wanted))
                    commands.append(AddBlocks(KEY, blocks))
                if advance.remaining is not None:
                    return outcomes
        return outcomes


@pytest.fixture(params=[0, 1, 2, 3], ids=lambda each: f"wrong every {each}")
def wrong_every(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def drawn(outcomes: Seq[StepOutcome]) -> list[int]:
    advances = [advance for outcome in outcomes for advance in outcome.advances]
    return [token for advance in advances for one in advance.outputs for token in one.token_ids]


def asked(max_tokens: int = 30, **changes: Any) -> Ticket:
    return ticket("r1", PROMPT, sampling=replace(SAMPLED, max_tokens=max_tokens, **changes))


RIGHT = expected(PROMPT, 30, Draw(SAMPLED, 0))


@pytest.mark.parametrize("num_drafts", [1, 4, 9])
def test_tokens_and_stamps_are_those_without_drafts(
    tmp_path: Path, device: Device, num_drafts: int, wrong_every: int
) -> None:
    """A block is stamped when its tokens are known, and never with a rejected draft: the arena
    compares its KV, which had the draft for a while."""
    host = Host(tmp_path, device, num_drafts, wrong_every)
    outcomes = host.run(asked())
    assert drawn(outcomes) == RIGHT
    completed = [block for o in outcomes for a in o.advances for block, _ in a.completed]
    assert completed == list(range((len(PROMPT) + 29) // SIZE))
    verified = [each for o in outcomes for a in o.advances for each in a.outputs]
    num_rejected = sum(each.num_drafts - each.num_accepted for each in verified)
    assert bool(num_rejected) is bool(wrong_every)
    assert sum(each.num_accepted for each in verified) == 30 - (host.model.num_steps)
    assert (host.model.num_steps == 30) is (wrong_every == 1)


def test_a_fault_after_a_wrong_draft_is_ignored(tmp_path: Path, device: Device) -> None:
    """A rejected draft, after which nothing is finite."""
    host = Host(tmp_path, device, 4, 1)
    host.model.poison = RIGHT[4] - 1  # the wrong draft in its place
    assert drawn(host.run(asked())) == RIGHT


def test_a_fault_after_a_right_draft_fails_the_group(tmp_path: Path, device: Device) -> None:
    host = Host(tmp_path, device, 4, 0)
    host.model.poison = RIGHT[4]
    outcomes = host.run(asked())
    assert drawn(outcomes) == RIGHT[:5]
    (failed,) = (one for outcome in outcomes for one in outcome.advances if one.fault)
    assert failed.fault is Fault.NOT_FINITE


def test_nothing_follows_a_draft_that_ends_the_text() -> None:
    """Whatever a drafter proposes: the tokens that were drawn behind the end are dropped."""
    first, last, after = RIGHT[:3]
    begun = TicketSequence(0, (first,), (0, 1, 2), len(PROMPT))
    detached = replace(asked(stop_token_ids=(last,)), sequences=(begun,))
    rules = Rules.of(detached, SIZE, frozenset(), max_model_len=1000)
    group = Group.to_continue(detached, rules, (), 3)
    (one,) = group.sequences
    one.launch(1, (last,))
    assert group.retire(one, 1, (last, after), (last,)) == 1
    advance, _ = group.take_advance()
    (output,) = advance.outputs
    assert (output.token_ids, output.finish_reason) == ((last,), FinishReason.STOP)
    assert not group.sequences


def test_drafts_stay_in_the_budget_and_in_the_slots(tmp_path: Path, device: Device) -> None:
    """5 tokens a step. A draft without a slot would raise an error."""
    host = Host(tmp_path, device, 64, 0, budget=5)
    outcomes = host.run(asked())
    steps = [step.num_tokens for outcome in outcomes for step in outcome.retired]
    assert steps[:3] == [5, 5, 5]
    assert max(steps) == 5
    assert drawn(outcomes) == RIGHT


# ── a worker ─────────────────────────────────────────────────────────────────────────────────────


async def test_a_gateway_gets_the_tokens_of_a_step_at_once(make_pair: MakePair) -> None:
    """With the numbers of drafts, which the worker counts."""
    pair = await make_pair()
    pair.decode.engine._engine._speculation = oracle(drawn_next, 3, 3)
    asked = replace(ticket("r1", PROMPT), sampling=replace(SAMPLED, max_tokens=30))
    issued = await start(pair, asked)
    await pair.until(lambda: finished(pair.session, "r1"))
    events = outputs(pair.session, "r1")
    assert [*issued.sequences[0].token_ids, *(t for e in events for t in e.token_ids)] == RIGHT
    positions = [len(PROMPT) + 1]
    for event in events:
        assert event.position == positions[-1]
        positions.append(event.position + len(event.token_ids))
        assert len(event.token_ids) == event.num_accepted + 1
    figures = {
        "num_drafts": sum(event.num_drafts > 0 for event in events),
        "num_draft_tokens": sum(event.num_drafts for event in events),
        "num_accepted_tokens": sum(event.num_accepted for event in events),
    }
    for name, value in figures.items():
        found = pair.decode_figures.get_sample_value(f"quire:spec_decode_{name}_total")
        assert found == value > 0
    await pair.until_empty()
