"""A client that does not read loses nothing if it reads on in time; otherwise it is cancelled."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from services.gateway.output import output
from services.gateway.output.delta import Delta
from services.runtime.errors import Overloaded
from tests.waiting import until

from .conftest import PROMPT, GatewayHarness, asked, read
from .fakes import FakeDecode, FakePrefill, expected

NUM_TOKENS = 100


@pytest.fixture
def decode() -> FakeDecode:
    """A worker that waits for a command at 40 tokens."""
    worker = FakeDecode(num_slots=1)
    worker.pause_after = 40
    return worker


async def stalled(harness: GatewayHarness, decode: FakeDecode) -> AsyncGenerator[Delta, None]:
    """A request with 39 unread tokens, since its client has read only the first delta."""
    deltas = read(harness.gateway, asked(max_tokens=NUM_TOKENS))
    assert (await anext(deltas)).token_ids == tuple(expected(PROMPT, 1))
    (request,) = harness.assembly.dispatcher.requests
    await until(lambda: len(request.output.sequences[0].tokens) == 40)
    return deltas


async def test_an_unread_request_goes_on(make_harness: Any, decode: FakeDecode) -> None:
    """Every token comes, and none is computed twice."""
    prefill = FakePrefill()
    harness = await make_harness(prefill, decode)
    async with aclosing(await stalled(harness, decode)) as deltas:
        decode.go_on(pause_after=NUM_TOKENS)
        tokens = [token async for delta in deltas for token in delta.token_ids]
    assert tokens == expected(PROMPT, NUM_TOKENS)[1:]
    assert [ticket.request_id for ticket in prefill.submitted] == ["r1"]


@pytest.mark.parametrize(("bound", "value"), [("MAX_UNREAD_TOKENS", 39), ("MAX_STALL_S", 0.0)])
async def test_a_client_that_never_reads_on_is_cancelled(
    make_harness: Any,
    decode: FakeDecode,
    monkeypatch: pytest.MonkeyPatch,
    bound: str,
    value: float,
) -> None:
    """By the number of its unread tokens, and by time: a slow decode would otherwise keep the slot
    for minutes."""
    harness = await make_harness(FakePrefill(), decode)
    async with aclosing(await stalled(harness, decode)) as deltas:
        monkeypatch.setattr(output, bound, value)
        assert not decode.aborted
        decode.go_on(pause_after=41)
        await until(lambda: bool(decode.aborted))
        with pytest.raises(Overloaded, match="too slowly"):
            await anext(deltas)
    assert harness.assembly.dispatcher.num_running == 0


async def test_a_client_that_leaves_unread_tokens_leaves_nothing(
    make_harness: Any, decode: FakeDecode
) -> None:
    harness = await make_harness(FakePrefill(), decode)
    await (await stalled(harness, decode)).aclose()
    await until(lambda: bool(decode.aborted))
    assert harness.assembly.dispatcher.num_running == 0
