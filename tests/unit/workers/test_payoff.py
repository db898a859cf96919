"""The number of drafts that rows get, by simulated costs and acceptance."""

from collections.abc import Sequence as Seq

import pytest

from services.engine.speculation.payoff import Drafting, Payoff

from .sequences import sequence


class Simulated:
    """A worker whose step takes 1, and `growth` more for each draft, of which a share is accepted
    at random. `depth`: what it takes to propose one more draft of all rows. `catch_up`: what it
    takes a row to catch up with a token of a step without drafts."""

    def __init__(
        self,
        growth: float,
        right: Seq[bool],
        num_rows: int = 1,
        depth: float = 0.0,
        catch_up: float = 0.0,
    ) -> None:
        self.payoff, self.growth, self.depth, self.catch_up = Payoff(), growth, depth, catch_up
        self.behind = [0] * num_rows
        self.rows = [sequence([1, 2, 3]) for _ in range(num_rows)]
        self.right = list(right)
        self.num_tokens, self.duration, self.num_drafts = 0, 0.0, 0

    def step(self, most: int = 8) -> None:
        numbers = self.payoff.numbers([(one, most) for one in self.rows], len(self.rows))
        num_caught_up, left = 0, 64 * self.payoff.may_catch_up
        for place, number in enumerate(numbers):
            if self.catch_up and number and self.behind[place]:
                caught_up = min(left, self.behind[place])
                num_caught_up += caught_up
                left -= caught_up
                self.behind[place] -= caught_up
                numbers[place] *= not self.behind[place]
            self.behind[place] += not numbers[place]
        spent = Drafting(max(numbers), num_caught_up * self.catch_up, max(numbers) * self.depth)
        duration = 1 + self.growth * sum(numbers) + spent.preparing_s + spent.proposing_s
        before = self.num_tokens
        for one, number in zip(self.rows, numbers, strict=True):
            accepted = 0
            while accepted < number and self.right[(self.num_tokens + accepted) % len(self.right)]:
                accepted += 1
            self.payoff.verified(one, number, accepted)
            self.num_tokens += accepted + 1
        num_accepted = self.num_tokens - before - len(self.rows)
        self.payoff.measured(len(self.rows), sum(numbers), num_accepted, duration, spent)
        self.num_drafts += sum(numbers)
        self.duration += duration

    def run(self, num_tokens: int) -> float:
        """The speed; without drafts it is the number of rows."""
        while self.num_tokens < num_tokens * len(self.rows):
            self.step()
        return self.num_tokens / self.duration


@pytest.mark.parametrize(
    ("growth", "num_rows"), [(0.0, 1), (0.02, 1), (0.1, 1), (1.0, 1), (0.01, 8), (0.125, 8)]
)
def test_drafts_that_are_never_accepted_cost_little(growth: float, num_rows: int) -> None:
    assert Simulated(growth, [False], num_rows).run(300) > 0.975 * num_rows


def test_drafts_that_are_always_accepted_become_as_many_as_may_be() -> None:
    """Except for the steps that measure the time without drafts."""
    simulated = Simulated(0.05, [True])
    assert simulated.run(1000) > 5
    assert simulated.payoff.numbers([(simulated.rows[0], 8)], 1) == [8]


def test_drafts_begin_again_when_the_text_repeats() -> None:
    simulated = Simulated(0.05, [False])
    simulated.run(1000)
    simulated.right = [True]
    before = simulated.num_drafts
    simulated.run(1500)
    assert simulated.num_drafts - before > 300


def test_a_step_that_grows_as_fast_as_its_tokens_gets_no_drafts() -> None:
    """Where arithmetic limits the speed, not memory."""
    simulated = Simulated(1.0, [True, True, True, False])
    simulated.run(300)
    before = simulated.num_drafts
    simulated.run(600)
    assert simulated.num_drafts - before < 10


def test_a_growth_that_was_measured_in_a_busy_moment_is_measured_again() -> None:
    simulated = Simulated(1.0, [True])
    simulated.run(500)
    simulated.growth = 0.02
    simulated.run(1500)
    before = simulated.num_drafts
    simulated.run(1600)
    assert simulated.num_drafts - before > 70


def test_the_likeliest_rows_get_the_drafts() -> None:
    payoff, rows = Payoff(), [sequence([1, 2, 3]) for _ in range(3)]
    payoff.measured(3, 0, 0, 1.0, Drafting())
    for _ in range(20):
        payoff.verified(rows[0], 3, 3)
        payoff.verified(rows[2], 3, 0)
        payoff.measured(3, 10, 3, 1.9, Drafting())
    first, second, third = payoff.numbers([(one, 5) for one in rows], 3)
    assert first == 5
    assert second > third == 0


def test_drafts_are_proposed_for_all_rows_in_the_time_of_one() -> None:
    """A draft model computes the next draft of 8 rows in 0.15 of a step: too much for a draft of
    one row, and little for 8."""
    simulated = Simulated(0.01, [True], num_rows=8, depth=0.15)
    assert simulated.run(600) > 3.0 * 8
    assert simulated.payoff.numbers([(one, 8) for one in simulated.rows], 8) == [8] * 8


@pytest.mark.parametrize("depth", [0.15, 0.6, 1.0])
@pytest.mark.parametrize("num_rows", [1, 8])
def test_a_draft_model_that_is_never_right_costs_little(depth: float, num_rows: int) -> None:
    """Also what it computes of prompts and of tokens that came without drafts. At first it may cost
    the time of 64 steps, to show what it can do."""
    simulated = Simulated(0.02, [False], num_rows, depth, catch_up=depth / 8)
    simulated.behind = [600] * num_rows
    simulated.run(500)
    began, before = simulated.duration, simulated.num_tokens
    assert simulated.duration < 500 + 64 + 25
    simulated.run(2500)
    speed = (simulated.num_tokens - before) / (simulated.duration - began)
    assert speed > 0.975 * num_rows


def test_a_draft_model_as_slow_as_its_target_is_not_used() -> None:
    """Though all its drafts are right."""
    simulated = Simulated(0.02, [True], depth=0.95)
    assert simulated.run(1000) > 0.97
    assert simulated.num_drafts < 60


def test_a_new_row_begins_with_the_chance_of_those_before_it() -> None:
    """Drafts that pay only if most are right, for 4 rows of which each ends after 200 tokens."""
    simulated = Simulated(0.1, [True], num_rows=4, depth=0.2)
    for number in range(10):
        simulated.rows = [sequence([1, 2, 3]) for _ in range(4)]
        speed = simulated.run(200 * (number + 1)) / 4
    assert speed > 1.3


def test_drafts_that_are_right_pay_for_catching_up_with_long_prompts() -> None:
    """20 prompts, each of which takes as long as 50 steps."""
    simulated = Simulated(0.02, [True], depth=0.1, catch_up=0.025)
    for number in range(20):
        simulated.behind = [2000]
        simulated.run(300 * (number + 1))
    assert simulated.num_tokens / simulated.duration > 1.8
