"""A client has few requests on the way to their first token; its others wait outside."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from services.gateway.access.caller import Caller
from services.gateway.frontend.api import GenerationRequest
from services.gateway.intake.admission import without_share
from services.gateway.scheduling.client_shares import (
    BESIDE_LIGHT_CLIENTS,
    DELAY_S,
    LIGHT_FOR_S,
    MOST_PER_PREFILL_WORKER,
    PER_PREFILL_WORKER,
    ClientShares,
)

from .walk import Walk, output_of


class Clients:
    """Requests of clients that enter the shares of one model queue."""

    def __init__(self) -> None:
        self.shares = ClientShares()
        self.num_prefill_workers = 1
        self.entered: list[str] = []
        self.leave: dict[str, Callable[[], None]] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def send(self, client: str, *names: str, priority: int = 0) -> None:
        request = GenerationRequest("x", priority=priority, caller=Caller(host=client))

        async def enter(name: str) -> None:
            async with self.shares.entered(request, self.num_prefill_workers) as self.leave[name]:
                self.entered.append(name)

        for name in names:
            self.tasks[name] = asyncio.create_task(enter(name))
        await self.settle()

    async def settle(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)


MANY = [f"a{number}" for number in range(PER_PREFILL_WORKER + 3)]


async def test_requests_of_a_client_enter_in_order_as_others_leave() -> None:
    clients = Clients()
    await clients.send("a", *MANY)
    assert clients.entered == MANY[:PER_PREFILL_WORKER]
    clients.leave["a1"]()
    clients.leave["a1"]()  # a second call does nothing
    await clients.settle()
    assert clients.entered == MANY[: PER_PREFILL_WORKER + 1]


async def test_room_grows_with_the_prefill_workers() -> None:
    clients = Clients()
    await clients.send("a", *MANY)
    clients.num_prefill_workers = 2
    await clients.send("a", "next")
    assert sorted(clients.entered) == sorted([*MANY, "next"])


@pytest.mark.parametrize(
    ("interval_s", "num_inside"),
    [(0.001, MOST_PER_PREFILL_WORKER), (DELAY_S / 20.5, 20), (0.1, PER_PREFILL_WORKER)],
)
async def test_room_is_for_what_gets_its_first_token_soon(
    interval_s: float, num_inside: int
) -> None:
    """It grows and shrinks with the time between requests that leave."""
    clients = Clients()
    now = clients.shares._clock()
    clients.shares._clock = lambda: now
    names = [f"a{number}" for number in range(500)]
    await clients.send("a", *names)
    left = iter(names)
    for interval in [0.001] * 100 + [interval_s] * 200:
        now += interval
        clients.leave[next(left)]()
        await clients.settle()
    assert len(clients.entered) - 300 == num_inside


async def test_another_client_enters_at_once() -> None:
    clients = Clients()
    await clients.send("a", *MANY)
    await clients.send("b", "b0")
    assert clients.entered[PER_PREFILL_WORKER:] == ["b0"]


async def test_a_client_with_several_priorities_has_one_share() -> None:
    """Its most urgent request enters next, and is the first one of those that wait."""
    clients = Clients()
    await clients.send("a", *MANY)
    await clients.send("a", "less", priority=1)
    await clients.send("a", "urgent", "also urgent", priority=-1)
    assert clients.entered == MANY[:PER_PREFILL_WORKER]
    for priority, num_outside in ((-2, 0), (-1, 2), (0, 5), (1, 6)):
        request = GenerationRequest("x", priority=priority, caller=Caller(host="a"))
        assert clients.shares.num_outside(request) == num_outside
    assert clients.shares.num_outside(GenerationRequest("x", caller=Caller(host="b"))) == 0
    clients.tasks["urgent"].cancel()
    for name in MANY[:PER_PREFILL_WORKER]:
        clients.leave[name]()
    await clients.settle()
    assert clients.entered[PER_PREFILL_WORKER:] == ["also urgent", *MANY[-3:], "less"]


async def test_priority_is_a_bounded_head_start_outside_too() -> None:
    """More urgent requests that come later do not keep another one outside for ever."""
    clients = Clients()
    now = clients.shares._clock()
    clients.shares._clock = lambda: now
    await clients.send("a", *MANY[:-2])
    now += 60
    await clients.send("a", "urgent", priority=-128)
    clients.leave["a0"]()
    await clients.settle()
    assert clients.entered[-1] == MANY[-3]


async def test_beside_a_light_client_another_one_has_less_room() -> None:
    """Until the light client has sent nothing for a while."""
    clients = Clients()
    now = clients.shares._clock()
    clients.shares._clock = lambda: now
    await clients.send("a", *MANY)
    await clients.send("b", "b0")
    for name in MANY[: PER_PREFILL_WORKER - BESIDE_LIGHT_CLIENTS]:
        clients.leave[name]()
    await clients.settle()
    assert clients.entered == [*MANY[:PER_PREFILL_WORKER], "b0"]
    clients.leave[MANY[PER_PREFILL_WORKER - 1]]()
    await clients.settle()
    assert clients.entered[-1] == MANY[PER_PREFILL_WORKER]
    now += LIGHT_FOR_S + 0.1
    clients.leave[MANY[PER_PREFILL_WORKER]]()
    await clients.settle()
    assert clients.entered[-2:] == MANY[-2:]


async def test_clients_with_requests_outside_leave_each_other_their_room() -> None:
    clients = Clients()
    await clients.send("a", *MANY)
    await clients.send("b", *(f"b{number}" for number in range(PER_PREFILL_WORKER + 3)))
    assert len(clients.entered) == 2 * PER_PREFILL_WORKER
    clients.leave["a0"]()
    await clients.settle()
    assert clients.entered[-1] == MANY[PER_PREFILL_WORKER]


async def test_cancelled_requests_let_the_next_one_in() -> None:
    """One waits outside, and one is cancelled in the moment in which it is let in."""
    clients = Clients()
    await clients.send("a", *MANY)
    clients.tasks[MANY[-3]].cancel()
    await clients.settle()
    clients.leave["a0"]()
    clients.tasks[MANY[-2]].cancel()
    await clients.settle()
    assert clients.entered == [*MANY[:PER_PREFILL_WORKER], MANY[-1]]


async def test_requests_cancelled_at_once_do_not_disturb_one_that_leaves() -> None:
    """A cancelled request runs only in the next iteration of the loop: in a storm of
    cancellations, others leave before."""
    clients = Clients()
    await clients.send("a", *MANY)
    for name in MANY[-3:-1]:
        clients.tasks[name].cancel()
    clients.leave["a0"]()
    await clients.settle()
    assert clients.entered == [*MANY[:PER_PREFILL_WORKER], MANY[-1]]


async def test_a_failed_admission_returns_its_room_and_no_client_is_remembered_for_long() -> None:
    shares = ClientShares()
    request = GenerationRequest("x", caller=Caller(host="a"))
    for _ in range(2 * PER_PREFILL_WORKER):
        with pytest.raises(ZeroDivisionError):
            async with shares.entered(request, 1):
                raise ZeroDivisionError
    assert not shares._shares
    now = shares._clock()
    shares._clock = lambda: now + LIGHT_FOR_S + 0.1
    async with shares.entered(GenerationRequest("x", caller=Caller(host="b")), 1):
        assert list(shares._light) == ["b"]


@pytest.mark.parametrize("has_place", [True, False])
async def test_a_resumed_request_keeps_the_place_of_its_first_call(has_place: bool) -> None:
    """Otherwise the place would stay taken for ever. The new call has a place of its own if the
    request was not there yet when it came; it returns that at once."""
    left: list[str] = []
    walk = Walk()
    walk.lifecycle.client.request = replace(
        walk.lifecycle.client.request, leave_share=lambda: left.append("first")
    )
    again = walk.lifecycle.client.request
    again = replace(
        again, leave_share=(lambda: left.append("second")) if has_place else without_share
    )
    walk.output = output_of(again)
    walk.lifecycle.resume(again, walk.output)
    assert left == ["second"] * has_place
    await walk.until_decoding()
    assert left == ["second"] * has_place + ["first"]
    walk.lifecycle.close()
