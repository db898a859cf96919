"""A client that does not read holds no slot, and loses nothing if it reads again in time."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from services.gateway.output import output
from services.gateway.output.delta import Delta
from services.runtime.errors import Overloaded
from tests.waiting import until

from .conftest import PROMPT, Call, GatewayHarness, asked, read
from .fakes import FakeDecode, FakePrefill, expected

NUM_TOKENS = 100


@pytest.fixture
def decode(monkeypatch: pytest.MonkeyPatch) -> FakeDecode:
    """One slot; a client may leave 20 tokens unread, and the worker waits for a command at 40."""
    monkeypatch.setattr(output, "PAUSE_UNREAD_TOKENS", 20)
    worker = FakeDecode(num_slots=1)
    worker.pause_after = 40
    return worker


async def stalled(harness: GatewayHarness, decode: FakeDecode) -> AsyncGenerator[Delta, None]:
    """A request at rest, since its client has read only the first delta."""
    deltas = read(harness.gateway, asked(max_tokens=NUM_TOKENS))
    assert (await anext(deltas)).token_ids == tuple(expected(PROMPT, 1))
    await until(lambda: bool(decode.at_rest))
    decode.pause_after = None
    return deltas


@pytest.mark.parametrize("bound", ["tokens", "time"])
async def test_an_unread_request_pauses_and_goes_on(
    make_harness: Any, decode: FakeDecode, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    """Meanwhile another request has its slot. Every token comes, and none is computed twice. Also
    with few unread tokens: a slow decode would otherwise keep the slot for minutes."""
    if bound == "time":
        monkeypatch.setattr(output, "PAUSE_UNREAD_TOKENS", 1_000_000)
        monkeypatch.setattr(output, "PAUSE_AFTER_S", 0.0)
    prefill = FakePrefill()
    harness = await make_harness(prefill, decode)
    async with aclosing(await stalled(harness, decode)) as deltas:
        await Call(harness.gateway, asked("r2")).result()
        assert not decode.running
        tokens = [token async for delta in deltas for token in delta.token_ids]
    assert tokens == expected(PROMPT, NUM_TOKENS)[1:]
    assert [ticket.request_id for ticket in prefill.submitted] == ["r1", "r2"]


async def test_a_client_that_never_reads_on_is_cancelled(
    make_harness: Any, decode: FakeDecode
) -> None:
    harness = await make_harness(FakePrefill(), decode, read_window_s=0.05)
    async with aclosing(await stalled(harness, decode)) as deltas:
        await until(lambda: bool(decode.aborted))
        with pytest.raises(Overloaded, match="too slowly"):
            await anext(deltas)
    assert harness.assembly.dispatcher.num_running == 0


async def test_a_client_that_leaves_during_a_pause_leaves_nothing(
    make_harness: Any, decode: FakeDecode
) -> None:
    harness = await make_harness(FakePrefill(), decode)
    await (await stalled(harness, decode)).aclose()
    await until(lambda: bool(decode.aborted))
    assert harness.assembly.dispatcher.num_running == 0


async def test_a_paused_request_may_lose_its_blocks(make_harness: Any, decode: FakeDecode) -> None:
    """Its ticket is taken back: it is computed again once its client reads, and not before."""
    prefill = FakePrefill()
    harness = await make_harness(prefill, decode)
    deltas = await stalled(harness, decode)
    decode.take_back("r1")
    await Call(harness.gateway, asked("r2")).result()
    assert len(prefill.submitted) == 2
    tokens = [token async for delta in deltas for token in delta.token_ids]
    assert tokens == expected(PROMPT, NUM_TOKENS)[1:]
    assert [ticket.request_id for ticket in prefill.submitted] == ["r1", "r2", "r1"]
