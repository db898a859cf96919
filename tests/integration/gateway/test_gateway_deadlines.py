"""A request that cannot meet its deadline is refused at once, and delays no other request."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from quire.v1 import prefill_pb2
from services.common.errors import DeadlineExceeded, WouldBeLate
from tests.waiting import until

from .conftest import Call, GatewayHarness, asked
from .fakes import FakeDecode, FakePrefill


class Busy:
    """A gateway whose only slot `r0` has, while `r1` waits, and whose workers have reported
    that."""

    def __init__(self, harness: GatewayHarness, prefill: FakePrefill, decode: FakeDecode) -> None:
        self.harness = harness
        self.prefill = prefill
        self.decode = decode
        self.calls: list[Call] = []

    def call(self, request_id: str, **fields: Any) -> Call:
        self.calls.append(Call(self.harness.gateway, asked(request_id, **fields)))
        return self.calls[-1]

    def has_taken(self, seconds: float) -> None:
        """Tell the gateway that a request ran for so long."""
        now = asyncio.get_running_loop().time()
        forecast = self.harness.assembly.dispatcher.model_queue("toy").forecast
        forecast.started("another", now - seconds)
        forecast.ended("another", 8, now)


@pytest.fixture
async def busy(make_harness: Any) -> AsyncIterator[Busy]:
    prefill, decode = FakePrefill(), FakeDecode(num_slots=1)
    busy = Busy(await make_harness(prefill, decode), prefill, decode)
    decode.pause_after = 2
    first = busy.call("r0")
    await until(lambda: len(first.tokens) == 2)
    busy.call("r1", timeout_s=60.0)
    await busy.harness.num_waiting(1)
    (worker,) = busy.harness.assembly.directory.decode_workers()["pool"]
    await until(lambda: not worker.is_open())
    yield busy
    for call in busy.calls:
        await call.cancel()


async def test_a_deadline_that_the_line_does_not_leave_is_refused_at_once(busy: Busy) -> None:
    """Each request takes 10 s: a new one would start in 20 s and end in 30 s, and the estimate has
    half as much again in reserve."""
    busy.has_taken(10.0)
    began = asyncio.get_running_loop().time()
    with pytest.raises(WouldBeLate, match=r"1 sequences go first: .* 20\.0 s and take 10\.0 s"):
        await busy.call("r2", timeout_s=44.0).result()
    assert asyncio.get_running_loop().time() - began < 1.0
    assert busy.harness.assembly.dispatcher.num_waiting == 1


async def test_requests_with_time_or_without_a_deadline_wait(busy: Busy) -> None:
    busy.has_taken(10.0)
    busy.call("r2", timeout_s=46.0)
    busy.call("r3")
    await busy.harness.num_waiting(3)


async def test_an_urgent_request_has_nobody_before_it(busy: Busy) -> None:
    busy.has_taken(10.0)
    busy.call("r2", timeout_s=36.0, priority=-1)
    await busy.harness.num_waiting(2)


async def test_no_request_is_refused_on_a_guess(busy: Busy) -> None:
    """No request has ended yet, and the running one began milliseconds ago."""
    busy.call("r2", timeout_s=20.0)
    await busy.harness.num_waiting(2)


async def test_a_late_request_is_not_begun(busy: Busy) -> None:
    """`r1` has a minute, and then requests turn out to take an hour: the slot goes to the next
    one."""
    busy.call("r2")
    await busy.harness.num_waiting(2)
    busy.has_taken(3600.0)
    busy.decode.go_on(pause_after=8)
    with pytest.raises(DeadlineExceeded, match="it waited so long"):
        await busy.calls[1].result()
    await busy.calls[2].result()
    submitted = [s.ticket.request_id for s in busy.prefill.commands(prefill_pb2.PrefillSubmit)]
    assert submitted == ["r0", "r2"]
