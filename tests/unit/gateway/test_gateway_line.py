"""Who is first: class, then arrival, and one class up for every 30 s of waiting."""

from dataclasses import dataclass

import pytest

from services.common.ticket import place_in_line
from services.gateway.line import RISE_EVERY_S, Line, Place, ServiceRate


@dataclass(frozen=True, eq=False)
class Somebody:
    place: Place
    num_sequences: int = 1


def somebody(arrival: int, priority: int = 0) -> Somebody:
    return Somebody(Place(priority, arrival))


def drained(line: Line[Somebody], now: float = 0.0) -> list[int]:
    """Arrivals in the order in which they are served."""
    served = []
    while (first := line.first(now)) is not None:
        served.append(first.place.arrival)
        line.leave(first)
    return served


def test_lower_class_first_then_arrival() -> None:
    line = Line[Somebody]()
    for arrival, priority in ((1, 0), (2, 5), (3, -5), (4, 0), (5, -5)):
        line.join(somebody(arrival, priority), now=0)
    assert drained(line) == [3, 5, 1, 4, 2]


def test_who_comes_back_stands_where_he_stood() -> None:
    line = Line[Somebody]()
    early, late = somebody(1), somebody(2)
    line.join(late, now=0)
    line.join(early, now=10)
    assert line.first(10) is early


def test_who_left_is_never_first_and_may_come_again() -> None:
    line = Line[Somebody]()
    one, two = somebody(1), somebody(2)
    line.join(one, now=0)
    line.join(two, now=0)
    line.leave(one)
    line.leave(one)
    assert (len(line), one in line, line.first(0)) == (1, False, two)
    line.join(one, now=0)
    assert drained(line) == [1, 2]
    assert len(line) == 0


def test_a_waiting_request_rises_one_class_every_30_s() -> None:
    """At 59 s it is one class up and still behind class -1; at 60 s it is level, and older."""
    line = Line[Somebody]()
    patient = somebody(1, priority=1)
    line.join(patient, now=0)
    urgent = somebody(2, priority=-1)
    line.join(urgent, now=50)
    assert line.first(59) is urgent
    assert patient.place.priority == 0
    assert line.first(60) is patient
    assert patient.place.order == place_in_line(-1, 1)


def test_rising_ends_at_the_first_class() -> None:
    line = Line[Somebody]()
    first, second = somebody(1, priority=-128), somebody(2, priority=-127)
    line.join(second, now=0)
    line.join(first, now=0)
    assert line.first(1000 * RISE_EVERY_S) is first
    assert second.place.priority == -128


def test_who_was_served_does_not_rise_any_more() -> None:
    line = Line[Somebody]()
    served = somebody(1, priority=3)
    line.join(served, now=0)
    line.leave(served)
    assert line.first(10 * RISE_EVERY_S) is None
    assert served.place.priority == 3


def test_who_goes_first_is_counted_by_class() -> None:
    """Four wait, of classes 0, 0, 3 and 5; one leaves, and the last rises to class 4."""
    line = Line[Somebody]()
    people = [somebody(arrival, priority) for arrival, priority in enumerate((0, 0, 3, 5))]
    for one in people:
        line.join(one, now=0)
    assert [line.num_ahead(priority) for priority in (-1, 0, 4, 5)] == [0, 2, 3, 4]
    line.leave(people[0])
    line.leave(people[0])
    line.first(RISE_EVERY_S)
    line.join(people[1], RISE_EVERY_S)
    assert [line.num_ahead(priority) for priority in (-2, -1, 2, 4)] == [0, 1, 2, 3]


@pytest.mark.parametrize(("interval_s", "delay_s"), [(0.5, 5.0), (1e-6, 0.1), (60, 30.0)])
def test_the_retry_delay_is_that_of_a_tenth_of_the_line(interval_s: float, delay_s: float) -> None:
    """100 wait and one leaves every half second: ten have left in 5 s. Never absurd."""
    rate = ServiceRate()
    for departure in range(50):
        rate.departed(departure * interval_s)
    assert rate.retry_delay_s(100, now=50 * interval_s) == pytest.approx(delay_s)


def test_a_line_that_stands_still_slows_the_rate() -> None:
    rate = ServiceRate()
    assert rate.retry_delay_s(100, now=5.0) == 1.0
    rate.departed(0.0)
    rate.departed(1.0)
    assert rate.retry_delay_s(10, now=2.0) < rate.retry_delay_s(10, now=20.0)
