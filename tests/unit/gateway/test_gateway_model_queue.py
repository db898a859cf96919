"""The queue serves by arrival, shifted by the bounded head start of a priority, and clients take
turns."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.scheduling.request_queue import RequestQueue
from services.protocol.ticket import PRIORITIES, head_start_ms, parts_of_order, queue_order


@dataclass(frozen=True, eq=False)
class QueuedRequest:
    priority: int
    arrival: int
    client: str = ""
    has_run: bool = False


def queued(arrival: int, priority: int = 0) -> QueuedRequest:
    return QueuedRequest(priority, arrival)


def add(line: RequestQueue[QueuedRequest], one: QueuedRequest) -> None:
    line.add(one, queue_order(one.priority, one.arrival), one.client, has_run=one.has_run)


def line_of(*waiting: QueuedRequest) -> RequestQueue[QueuedRequest]:
    line = RequestQueue[QueuedRequest]()
    for one in waiting:
        add(line, one)
    return line


def drained(line: RequestQueue[QueuedRequest]) -> list[int]:
    """Arrivals in the order of service."""
    served = []
    while (first := line.first()) is not None:
        served.append(first.arrival)
        line.remove(first)
    return served


def test_lower_priority_first_then_arrival() -> None:
    positions = ((1, 0), (2, 5), (3, -5), (4, 0), (5, -5))
    assert drained(line_of(*(queued(*one) for one in positions))) == [3, 5, 1, 4, 2]


def test_a_request_that_left_is_never_first_and_may_come_again() -> None:
    line = RequestQueue[QueuedRequest]()
    one, two = queued(1), queued(2)
    add(line, one)
    add(line, two)
    line.remove(one)
    line.remove(one)
    assert (len(line), one in line, line.first()) == (1, False, two)
    add(line, one)
    assert drained(line) == [1, 2]
    assert len(line) == 0


@pytest.mark.parametrize(
    ("priority", "before", "head_start_s"),
    [(0, 1, 30.0), (-1, 0, 30.0), (0, 2, 40.0), (-5, 0, 50.0), (-128, 0, 59.534), (-1, 1, 60.0)],
)
def test_a_priority_is_a_head_start(priority: int, before: int, head_start_s: float) -> None:
    """An urgent request goes first if it arrives at most so much later."""
    head_start = round(1000 * head_start_s)
    patient = queued(1_000_000, before)
    in_time = queued(1_000_000 + head_start, priority)
    late = queued(1_000_000 + head_start + 1, priority)
    assert line_of(patient, late, in_time).first() is in_time
    assert line_of(patient, late).first() is patient


def test_every_priority_goes_before_the_next_and_none_is_a_minute_from_the_default() -> None:
    head_starts = [head_start_ms(priority) for priority in PRIORITIES]
    assert head_starts == sorted(set(head_starts), reverse=True)
    assert all(abs(head_start) < 60_000 for head_start in head_starts)


ARRIVALS = st.integers(0, 2**43)
PRIORITY = st.sampled_from(PRIORITIES)


@given(ARRIVALS, PRIORITY, ARRIVALS, PRIORITY)
def test_an_order_names_one_priority_and_arrival(
    arrival: int, priority: int, another_arrival: int, another: int
) -> None:
    order = queue_order(priority, arrival)
    assert 0 <= order < 2**52
    assert parts_of_order(order) == (priority, arrival)
    if arrival != another_arrival:
        assert order != queue_order(another, another_arrival)


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from((-1, 0)), st.booleans()), max_size=30
    )
)
def test_a_queue_empties_whatever_is_in_it(requests: list[tuple[str, int, bool]]) -> None:
    """Each request is first once, those of one client and class in the order of their arrival."""
    waiting = [
        QueuedRequest(priority, arrival, client, has_run)
        for arrival, (client, priority, has_run) in enumerate(requests)
    ]
    served = drained(line_of(*waiting))
    assert sorted(served) == list(range(len(waiting)))
    for client, priority, has_run in set(requests):
        same = [n for n, each in enumerate(requests) if each == (client, priority, has_run)]
        assert [n for n in served if n in same] == same


def of_clients(clients: str, *, priority: int = 0) -> list[QueuedRequest]:
    """One request for each letter, in the order of their arrival."""
    return [QueuedRequest(priority, arrival, client) for arrival, client in enumerate(clients)]


def test_clients_take_turns_at_the_head_of_the_queue() -> None:
    """`a` has four requests before `b` and `c` send theirs."""
    line = line_of(*of_clients("aaaabbc"))
    assert drained(line) == [0, 4, 6, 1, 5, 2, 3]


def test_a_client_that_comes_has_its_turn_after_those_that_wait() -> None:
    """So clients without end do not keep a request that needs many slots from its turn."""
    line = line_of(*of_clients("aab"))
    first = line.first()
    add(line, QueuedRequest(0, 9, "c"))
    assert line.first() is first
    assert drained(line) == [0, 2, 9, 1]


def test_turns_are_within_a_class() -> None:
    """An urgent request of a client with many requests goes before default ones of others."""
    urgent = [QueuedRequest(-1, 10 + number, "a") for number in range(3)]
    assert drained(line_of(*of_clients("ab"), *urgent)) == [10, 11, 12, 0, 1]


def test_a_request_that_has_run_goes_before_new_ones_of_its_class() -> None:
    """Its client had its turn, and may have older requests that wait."""
    requeued = [QueuedRequest(0, arrival, "a", has_run=True) for arrival in (8, 7)]
    urgent = QueuedRequest(-1, 9, "b")
    assert drained(line_of(*of_clients("aab"), *requeued, urgent)) == [9, 7, 8, 0, 2, 1]


def test_a_clients_waiting_requests_are_counted() -> None:
    requests = of_clients("aab")
    line = line_of(*requests)
    line.remove(requests[0])
    assert [line.num_of(client) for client in "abc"] == [1, 1, 0]
