"""Speculation on a device that computes beside the engine: when the engine waits for tokens, and
how many steps its sequences take. Blocks of 4."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from blockstore.records import PoolSpec
from services.engine.batch import Draw, Row, RowResult
from services.engine.engine import Engine
from services.engine.messages import AddBlocks, Admit, Command, StepOutcome
from services.engine.scheduler import ScheduledSequence, Scheduler
from services.engine.sequences.group import Group
from services.engine.sequences.sequence import Rules, Sequence
from services.engine.speculation.draft_model import DraftModel
from services.engine.speculation.ngram import NgramDrafter
from services.engine.speculation.payoff import Payoff
from services.engine.speculation.speculation import Speculation
from tests.drafting import AsMany, Oracle
from tests.late_device import CompleteFlight, LateForward

from .fakes import SAMPLED, Arena, FakeForward, expected, make_stamps, next_token, ticket
from .sequences import KEY, SIZE, sequence
from .test_draft_model import Computing

NUM_TOKENS = 41
DRAW = Draw(SAMPLED, 0)


@dataclass
class Found:
    tokens: dict[str, list[int]]
    num_steps: dict[str, int]
    """How many steps each sequence took."""
    num_ahead: int


def run(
    directory: Path,
    speculation: Speculation | None,
    arrivals: Seq[int],
    stop_ids: Seq[int] = (),
    poison: int | None = None,
    **changes: Any,
) -> Found:
    """The prompts are one token each, and begin after so many steps of the engine. `changes` are of
    the last one. After the token `poison` nothing is finite."""
    spec = PoolSpec("pool", "model", "fingerprint", 200, SIZE, block_bytes=1)
    stamps = make_stamps(directory / "stamps", spec)
    stamps.mark_owned(range(spec.num_blocks), KEY)
    model = FakeForward(Arena(SIZE, stamps))
    device, model.poison = LateForward(model), poison
    engine = Engine(
        device,
        Scheduler(64, 64),
        stamps,
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
            sampling = replace(SAMPLED, max_tokens=NUM_TOKENS, stop_token_ids=tuple(stop_ids))
            if index == len(arrivals) - 1:
                sampling = replace(sampling, **changes)
            asked = ticket(f"r{index + 1}", (index + 1,), sampling=sampling)
            rules = Rules.of(asked, SIZE, frozenset(), max_model_len=1000)
            group = Group.to_compute(asked, rules, list(islice(new_blocks, 2)))
            groups[group.key] = group
            commands.append(Admit(group))
        outcome = engine.step(commands)
        number += 1
        for advance in outcome.advances:
            if advance.outputs:
                tokens = found.tokens.setdefault(advance.key, [])
                tokens += [token for one in advance.outputs for token in one.token_ids]
                found.num_steps[advance.key] = found.num_steps.get(advance.key, 0) + 1
    found.num_ahead = device.num_ahead
    ends = [*stop_ids, -1 if poison is None else poison]
    assert found.tokens == {f"h-r{i + 1}": answer(i, ends) for i in range(len(arrivals))}
    return found


def answer(index: int, stop_ids: Seq[int] = ()) -> list[int]:
    tokens = expected((index + 1,), NUM_TOKENS, DRAW)
    ends = [place for place, token in enumerate(tokens) if token in stop_ids]
    return tokens[: min(ends, default=NUM_TOKENS) + 1]


def drawn_next(one: Sequence, tokens: list[int]) -> int:
    return next_token(tokens, DRAW)


class Never(AsMany):
    def numbers(self, chances: Seq[Seq[float]]) -> list[int]:
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
    payoff, nobody = Payoff(), cast("Group", SimpleNamespace(one_token=False))
    speculation = Speculation(Oracle(drawn_next), 4, payoff)
    plain = ScheduledSequence(nobody, sequence([1, 2, 3]), 1)
    for _ in range(4):
        speculation.retired([plain], [0], 1.0, 0.0, False)
        speculation.retired([plain], [0], 1.5, 0.5, False)
    for _ in range(20):
        speculation.retired([plain._replace(drafts=(4, 5))], [1], 1.5, 0.5, False)
    assert payoff.numbers([[0.15]]) == [0]
    assert payoff.numbers([[0.27]]) == [1]


class SometimesRight(Computing):
    """Its drafts are the target's next tokens, but for those of some contexts."""

    def __init__(self, wrong_every: int) -> None:
        super().__init__()
        self._wrong_every = wrong_every

    def _compute(self, row: Row) -> RowResult:
        result = super()._compute(row)
        assert isinstance(result, tuple)
        is_wrong = bool(self._wrong_every) and any(t % self._wrong_every == 0 for t in result)
        return tuple(abs(token - 1) for token in result) if is_wrong else result


class SomeTimes(AsMany):
    """Allows any numbers of drafts, drawn at random; often none."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = Random(seed)

    def numbers(self, chances: Seq[Seq[float]]) -> list[int]:
        return [self._random.choice((0, *range(len(row) + 1))) for row in chances]


def drafting(
    numbers: AsMany, num_tokens: int, wrong_every: int = 0, num_blocks: int = 400
) -> Speculation:
    """A draft model on a device as late as the target's."""
    computing = SometimesRight(wrong_every)
    forward: Any = SimpleNamespace(
        launch=lambda rows, *_: CompleteFlight(computing(rows)), on_idle=None
    )
    launch = LateForward(forward, most_flights=999).launch
    model = DraftModel(
        lambda rows: launch(rows).result(), num_blocks, SIZE, 1000, launch, runs_ahead=True
    )
    return Speculation(model, num_tokens, numbers)


@pytest.mark.parametrize(("num_drafts", "num_steps"), [(1, 21), (3, 11), (4, 9)])
def test_no_step_waits_for_the_host_to_count_accepted_drafts(
    tmp_path: Path, num_drafts: int, num_steps: int
) -> None:
    """All drafts are right. Each sequence takes as few steps as with a host that waits, and one
    more at its end: a step does not run ahead where it may have nothing to do. Each step but the
    first and the last takes tokens that the host does not know."""
    found = run(tmp_path, drafting(AsMany(), num_drafts), STAGGERED)
    assert max(found.num_steps.values()) <= num_steps + 1
    num_rows = sum(found.num_steps.values())
    assert found.num_ahead >= num_rows - 2 * len(STAGGERED)


@pytest.mark.parametrize("wrong_every", [2, 3, 7])
def test_steps_run_ahead_of_drafts_that_are_rejected(tmp_path: Path, wrong_every: int) -> None:
    """They take about as many steps as a host that waits: nothing is drafted behind tokens that are
    not there."""
    found = run(tmp_path, drafting(AsMany(), 4, wrong_every), STAGGERED)
    waiting = drafting(AsMany(), 4, wrong_every)
    waiting._drafter.runs_ahead = False  # type: ignore[misc]
    waited = run(tmp_path, waiting, STAGGERED)
    assert waited.num_ahead == 0
    for key, num_steps in waited.num_steps.items():
        assert found.num_steps[key] <= num_steps + 2
    assert found.num_ahead >= sum(found.num_steps.values()) - 3 * len(STAGGERED)


@pytest.mark.parametrize("seed", range(12))
def test_any_numbers_of_drafts_may_follow_each_other(tmp_path: Path, seed: int) -> None:
    """Also none, with other sequences' drafts in the same step; and where the draft model has
    blocks for two of four sequences, so that they lose its KV while drafts are in flight."""
    num_blocks = 28 if seed % 2 else 400
    run(tmp_path, drafting(SomeTimes(seed), 4, seed % 5, num_blocks), STAGGERED)


def test_a_sequence_that_ends_among_drafts_drops_the_step_behind(tmp_path: Path) -> None:
    stop_ids = [answer(0)[6], answer(1)[11], answer(3)[20]]
    found = run(tmp_path, drafting(AsMany(), 4, 3), STAGGERED, stop_ids)
    assert len(found.tokens["h-r1"]) == 7


def test_steps_behind_drafts_with_penalties_wait_for_the_host(tmp_path: Path) -> None:
    """Until that sequence has ended, so all wait with it, and share their steps."""
    found = run(
        tmp_path, drafting(AsMany(), 4), STAGGERED, repetition_penalty=1.5, max_tokens=NUM_TOKENS
    )
    assert 0 < found.num_ahead < 16
    assert max(found.num_steps.values()) <= 11


@pytest.mark.parametrize("place", [5, 6, 7, 8, 9])
def test_a_fault_behind_accepted_drafts_fails_its_request_alone(tmp_path: Path, place: int) -> None:
    """The step in flight goes on behind the last token that was drawn, as the host does."""
    poison = answer(1)[place]
    found = run(tmp_path, drafting(AsMany(), 4), STAGGERED, poison=poison)
    assert len(found.tokens["h-r2"]) == place + 1
