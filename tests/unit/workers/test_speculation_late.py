"""Speculation on a device that computes beside the engine: when the engine waits for tokens, and
how many steps its sequences take. Blocks of 4."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import pytest

from blockstore.records import PoolSpec
from services.engine.batch import Draw
from services.engine.engine import Engine
from services.engine.messages import AddBlocks, Admit, Command, StepOutcome
from services.engine.scheduler import Scheduler
from services.engine.sequences.group import Group
from services.engine.sequences.sequence import Rules, Sequence
from services.engine.speculation.ngram import NgramDrafter
from services.engine.speculation.payoff import Drafting, Payoff
from services.engine.speculation.speculation import Speculation
from tests.drafting import AsMany, Oracle
from tests.late_device import LateForward

from .fakes import SAMPLED, Arena, FakeForward, expected, make_stamps, next_token, ticket
from .sequences import KEY, SIZE

NUM_TOKENS = 41
DRAW = Draw(SAMPLED, 0)


@dataclass
class Found:
    tokens: dict[str, list[int]]
    num_steps: dict[str, int]
    """How many steps each sequence took."""
    num_ahead: int


def run(directory: Path, speculation: Speculation | None, arrivals: Seq[int]) -> Found:
    """The prompts are one token each, and begin after so many steps of the engine."""
    spec = PoolSpec("pool", "model", "fingerprint", 200, SIZE, block_bytes=1)
    stamps = make_stamps(directory / "stamps", spec)
    stamps.mark_owned(range(spec.num_blocks), KEY)
    device = LateForward(FakeForward(Arena(SIZE, stamps)))
    engine = Engine(
        *(device, Scheduler(64, 64), stamps),
        look_ahead=8,
        speculation=speculation,
    )
    found, number, outcome = Found({}, {}, 0), 0, StepOutcome()
    new_blocks, groups = iter(range(spec.num_blocks)), dict[str, Group]()
    while number <= max(arrivals) or outcome.is_busy:
        commands = list[Command]()
        for advance in outcome.advances:
            group = groups[advance.key]
            if (wanted := advance.wanted_blocks - group.num_acquired) > 0:
                commands.append(AddBlocks(advance.key, tuple(islice(new_blocks, wanted))))
        for index in [i for i, arrival in enumerate(arrivals) if arrival == number]:
            sampling = replace(SAMPLED, max_tokens=NUM_TOKENS)
            asked = ticket(f"r{index + 1}", (index + 1,), sampling=sampling)
            rules = Rules.of(asked, SIZE, frozenset(), max_model_len=1000)
            group = Group.to_compute(asked, rules, list(islice(new_blocks, 2)))
            groups[group.key] = group
            commands.append(Admit(group))
        outcome = engine.step(commands)
        number += 1
        for advance in outcome.advances:
            if advance.tokens:
                tokens = found.tokens.setdefault(advance.key, [])
                tokens += [one.token for one in advance.tokens]
                found.num_steps[advance.key] = found.num_steps.get(advance.key, 0) + 1
    found.num_ahead = device.num_ahead
    assert found.tokens == {
        f"h-r{i + 1}": expected((i + 1,), NUM_TOKENS, DRAW) for i in range(len(arrivals))
    }
    return found


def drawn_next(one: Sequence, tokens: list[int]) -> int:
    return next_token(tokens, DRAW)


class Never(AsMany):
    def numbers(self, chances: Seq[Seq[float]], num_rows: int) -> list[int]:
        return [0 for _ in chances]


STAGGERED = (0, 1, 2, 5)


def test_steps_run_ahead_while_no_drafts_pay(tmp_path: Path) -> None:
    """As without speculation: each step but the first takes a token that the host does not know."""
    found = run(tmp_path, Speculation(Oracle(drawn_next), 4, Never()), STAGGERED)
    assert found.num_ahead == 4 * (NUM_TOKENS - 1)
    assert set(found.num_steps.values()) == {NUM_TOKENS}


@pytest.mark.parametrize(("num_drafts", "num_steps"), [(1, 21), (3, 11), (4, 9)])
def test_staggered_sequences_share_their_steps(
    tmp_path: Path, num_drafts: int, num_steps: int
) -> None:
    """All drafts are right: a step yields as many tokens, and one more, of each sequence. Sequences
    in two batches that alternate would take as many steps of their own, and twice the time."""
    speculation = Speculation(Oracle(drawn_next), num_drafts, AsMany())
    found = run(tmp_path, speculation, STAGGERED)
    assert set(found.num_steps.values()) == {num_steps}
    assert found.num_ahead == 0
    together = run(tmp_path, Speculation(Oracle(drawn_next), num_drafts, AsMany()), (0, 0, 0, 0))
    assert together.num_steps == found.num_steps


def test_prompt_lookup_waits_for_tokens_only_where_a_match_goes_on(tmp_path: Path) -> None:
    """These tokens hardly repeat, so nearly all steps run ahead."""
    found = run(tmp_path, Speculation(NgramDrafter(2, 5), 4, Payoff()), (0,))
    assert found.num_ahead >= 0.9 * (NUM_TOKENS - 1)


def test_the_time_of_a_step_without_drafts_is_the_device_s() -> None:
    """Steps that run ahead take 1. One that waited for the host takes 1.5 in all, as long as one
    with 2 drafts that waited: so a draft costs a quarter of a step."""
    payoff = Payoff()
    for _ in range(4):
        payoff.measured(1, 0, 0, 1.0, Drafting())
        payoff.measured(1, 0, 0, 1.5, Drafting(launching_s=0.5))
    for _ in range(20):
        payoff.measured(1, 2, 1, 1.5, Drafting(launching_s=0.5))
    assert payoff.numbers([[0.15]], 1) == [0]
    assert payoff.numbers([[0.27]], 1) == [1]
