"""Workers die, and the gateways know over which requests: over real streams, of one gateway and of
two."""

from typing import Any

import pytest

from tests.waiting import until

from .conftest import PROMPT, Call, asked
from .fakes import FakeDecode, FakePrefill, expected


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_requests_of_workers_that_left_go_on(harness: Any, role: str) -> None:
    """A worker that closes its stream did not die of a request."""
    prefill, decode = harness.workers
    prefill.holds = role == "prefill"
    decode.pause_after = 1
    call = Call(harness.gateway, asked())
    worker = prefill if role == "prefill" else decode
    for _ in range(2):
        await until(lambda: bool(prefill.held or decode.running))
        prefill.held.clear()
        worker.close_streams()
        await until(lambda: not worker.sessions and not decode.running)
    await until(lambda: bool(prefill.held or decode.running))
    prefill.let_go()
    decode.go_on(pause_after=8)
    await call.result()
    assert call.tokens == expected(PROMPT, 8)


async def test_requests_of_workers_that_fell_silent_go_on(make_harness: Any) -> None:
    """Stopped or starved workers: a process that sends nothing has not died."""
    prefill = FakePrefill()
    harness = await make_harness(prefill, FakeDecode(), silence_s=0.4)
    prefill.holds = True
    call = Call(harness.gateway, asked())
    for number in (1, 2):
        await until(lambda number=number: len(prefill.held) == number)  # type: ignore[misc]
        prefill.stuck = True
        await until(lambda: "prefill-1" not in harness.connected())
        prefill.stuck = False
    await until(lambda: len(prefill.held) == 3)
    del prefill.held[:2]
    prefill.let_go()
    await call.result()
    assert call.tokens == expected(PROMPT, 8)


async def test_a_worker_that_is_leaving_is_expected_to_end(harness: Any) -> None:
    """It does not matter how its stream ends."""
    prefill, _ = harness.workers
    prefill.holds = True
    call = Call(harness.gateway, asked())
    await until(lambda: bool(prefill.held))
    prefill.report(prefill.load, draining=True)
    await until(lambda: "prefill-1" not in harness.connected())
    other = FakePrefill("prefill-2")
    await harness.add(other)
    prefill.die()
    await call.result()
    assert call.tokens == expected(PROMPT, 8)
