"""The number of drafts that rows get, by simulated costs and acceptance."""

from collections.abc import Sequence as Seq

import pytest

from services.engine.speculation.average import acceptance
from services.engine.speculation.payoff import Payoff


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
        self.rows = [acceptance() for _ in range(num_rows)]
        self.right = list(right)
        self.num_tokens, self.duration, self.num_drafts = 0, 0.0, 0

    def numbers(self, most: int = 8) -> list[int]:
        return self.payoff.numbers(
            [[one.value**n for n in range(1, most + 1)] for one in self.rows]
        )

    def step(self, most: int = 8) -> None:
        numbers = self.numbers(most)
        num_caught_up, left = 0, 64 * self.payoff.may_lose
        for place, number in enumerate(numbers):
            if self.catch_up and number and self.behind[place]:
                caught_up = min(left, self.behind[place])
                num_caught_up += caught_up
                left -= caught_up
                self.behind[place] -= caught_up
                numbers[place] *= not self.behind[place]
            self.behind[place] += not numbers[place]
        duration = 1 + self.growth * sum(numbers) + self.depth * max(numbers)
        catch_up_s = self.catch_up * num_caught_up
        duration += catch_up_s
        before = self.num_tokens
        for one, number in zip(self.rows, numbers, strict=True):
            accepted = 0
            while accepted < number and self.right[(self.num_tokens + accepted) % len(self.right)]:
                accepted += 1
            for draft in range(min(accepted + 1, number)):
                one.add(draft < accepted)
            self.num_tokens += accepted + 1
        num_accepted = self.num_tokens - before - len(self.rows)
        self.payoff.measured(len(self.rows), sum(numbers), num_accepted, duration, catch_up_s)
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
    assert Simulated(growth, [False], num_rows).run(300) > 0.96 * num_rows


def test_drafts_that_are_always_accepted_become_as_many_as_may_be() -> None:
    """Except for the steps that measure the time without drafts."""
    simulated = Simulated(0.05, [True])
    assert simulated.run(1000) > 5
    assert simulated.numbers() == [8]


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
    assert simulated.num_drafts - before < 15


def test_a_growth_that_was_measured_in_a_busy_moment_is_measured_again() -> None:
    simulated = Simulated(1.0, [True])
    simulated.run(500)
    simulated.growth = 0.02
    simulated.run(1500)
    before = simulated.num_drafts
    simulated.run(1600)
    assert simulated.num_drafts - before > 70


def known(num_rows: int, *steps: tuple[int, float]) -> Payoff:
    """With two plain steps that take 1, and steps of (drafts, duration), 9 of each."""
    payoff = Payoff()
    for _ in range(2):
        payoff.measured(num_rows, 0, 0, 1.0)
    for num_drafts, duration in steps:
        for _ in range(9):
            payoff.measured(num_rows, num_drafts, 0, duration)
    return payoff


def test_the_likeliest_rows_get_the_drafts() -> None:
    payoff = known(3, (3, 1.3), (5, 1.5), (8, 1.8))
    chances = [[0.95**n for n in range(1, 6)], [0.5, 0.25], [0.2, 0.1, 0.05]]
    assert payoff.numbers(chances) == [5, 1, 0]


def test_a_draft_that_is_hardly_ever_right_is_not_chosen() -> None:
    """Even if it costs nothing."""
    payoff = known(1, (1, 1.0), (2, 1.0))
    assert payoff.numbers([[0.1, 0.04]]) == [1]
    assert payoff.numbers([[0.04]]) == [0]


def test_no_step_tries_more_than_twice_the_drafts_of_the_longest_one_before() -> None:
    payoff, chances = known(1), [[0.95**n for n in range(1, 17)]]
    for number in (1, 3, 7, 15, 16, 16):
        assert payoff.numbers(chances) == [number]
        payoff.measured(1, number, 0, 1.2)
    assert payoff.numbers([[]] * 8) == [0] * 8
    for _ in range(2):
        payoff.measured(8, 0, 0, 1.0)
    assert payoff.numbers(chances * 8) == [1] * 8


def test_one_interrupted_step_stops_no_drafts() -> None:
    payoff, chances = known(1, (4, 1.2)), [[0.9**n for n in range(1, 9)]]
    payoff.measured(1, 8, 8, 20.0)
    assert payoff.numbers(chances) >= [7]
    for _ in range(12):
        payoff.measured(1, 8, 8, 20.0)
    assert payoff.numbers(chances) < [7]


def test_two_steps_without_drafts_come_first_and_one_every_64_steps() -> None:
    payoff, chances = Payoff(), [[0.99] * 8]
    for number in range(200):
        (num_drafts,) = payoff.numbers(chances)
        assert (num_drafts == 0) == (number == 1 or number % 64 == 0)
        payoff.measured(1, num_drafts, num_drafts, 1.1 if num_drafts else 1.0)
    assert payoff.numbers([chances[0]] * 2) == [0, 0]  # two rows have figures of their own


def test_a_slow_first_step_makes_no_drafts_cheap() -> None:
    """It may be the first of its shape. Here a draft costs a fifth of a step."""
    payoff = Payoff()
    for duration in (10.0, 1.0):
        payoff.measured(1, 0, 0, duration)
    for _ in range(9):
        payoff.measured(1, 1, 0, 1.2)
    assert payoff.numbers([[0.15]]) == [0]
    assert payoff.numbers([[0.3]]) == [1]


def test_a_step_in_64_tries_drafts_that_do_not_seem_to_pay() -> None:
    """One of each row that has some. Not while drafts have lost more than they may."""
    payoff = known(3)
    for _ in range(30):
        assert payoff.numbers([[0.01, 0.01], [], [0.04]]) == [0, 0, 0]
        payoff.measured(3, 0, 0, 1.0)
    assert payoff.numbers([[0.01, 0.01], [], [0.04]]) == [1, 0, 1]
    payoff.measured(3, 2, 0, 100.0, None)
    assert not payoff.may_lose
    assert payoff.numbers([[0.01, 0.01], [], [0.04]]) == [0, 0, 0]


def test_a_step_of_many_rows_tries_drafts() -> None:
    """Of 64 rows, each draft lengthens the step by 0.002, as on a GPU; half of them are right."""
    assert Simulated(0.002, [True, False], num_rows=64).run(300) > 1.25 * 64
    assert Simulated(0.02, [False], num_rows=64).run(300) > 0.96 * 64


def test_drafts_are_proposed_for_all_rows_in_the_time_of_one() -> None:
    """A draft model computes the next draft of 8 rows in 0.15 of a step: too much for a draft of
    one row, and little for 8."""
    simulated = Simulated(0.01, [True], num_rows=8, depth=0.15)
    assert simulated.run(600) > 3.0 * 8
    assert simulated.numbers() == [8] * 8


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


def test_a_draft_model_as_slow_as_its_target_costs_little() -> None:
    """All its drafts are right."""
    assert Simulated(0.02, [True], depth=1.0).run(1000) > 0.97


def test_a_new_row_begins_with_the_chance_of_those_before_it() -> None:
    """Drafts that pay only if most are right, for 4 rows of which each ends after 200 tokens."""
    simulated = Simulated(0.1, [True], num_rows=4, depth=0.2)
    for number in range(10):
        simulated.rows = [acceptance() for _ in range(4)]
        speed = simulated.run(200 * (number + 1)) / 4
    assert speed > 1.3


def test_drafts_that_are_right_pay_for_catching_up_with_long_prompts() -> None:
    """20 prompts, each of which takes as long as 50 steps."""
    simulated = Simulated(0.02, [True], depth=0.1, catch_up=0.025)
    for number in range(20):
        simulated.behind = [2000]
        simulated.run(300 * (number + 1))
    assert simulated.num_tokens / simulated.duration > 1.8
