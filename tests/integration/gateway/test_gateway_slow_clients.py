"""A client that does not read holds no slot, and loses nothing if it reads on in time."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from services.common.errors import Overloaded
from services.gateway import output
from services.gateway.api import Delta

from .conftest import PROMPT, Call, House, asked, until
from .fakes import FakeDecode, FakePrefill, expected

NUM_TOKENS = 100


@pytest.fixture
def decode(monkeypatch: pytest.MonkeyPatch) -> FakeDecode:
    """One slot; a client may leave 20 tokens unread, and the worker waits at 40 for a command."""
    monkeypatch.setattr(output, "PAUSE_UNREAD_TOKENS", 20)
    worker = FakeDecode(num_slots=1)
    worker.pause_after = 40
    return worker


async def stalled(house: House, decode: FakeDecode) -> AsyncGenerator[Delta, None]:
    """A request that came to rest since its client read the first delta and no more."""
    deltas = house.gateway.generate(asked(max_tokens=NUM_TOKENS))
    assert (await anext(deltas)).token_ids == tuple(expected(PROMPT, 1))
    await until(lambda: bool(decode.at_rest))
    decode.pause_after = None
    return deltas


async def test_who_does_not_read_pauses_and_goes_on(make_house: Any, decode: FakeDecode) -> None:
    """Meanwhile its slot is another's. Every token comes, and none is computed twice."""
    prefill = FakePrefill()
    house = await make_house(prefill, decode)
    async with aclosing(await stalled(house, decode)) as deltas:
        await Call(house.gateway, asked("r2")).result()
        assert not decode.running
        tokens = [token async for delta in deltas for token in delta.token_ids]
    assert tokens == expected(PROMPT, NUM_TOKENS)[1:]
    assert [ticket.request_id for ticket in prefill.submitted] == ["r1", "r2"]


async def test_who_never_reads_on_is_cancelled(make_house: Any, decode: FakeDecode) -> None:
    house = await make_house(FakePrefill(), decode, read_window_s=0.05)
    async with aclosing(await stalled(house, decode)) as deltas:
        await until(lambda: bool(decode.aborted))
        with pytest.raises(Overloaded, match="too slowly"):
            await anext(deltas)
    assert house.assembly.dispatcher.num_running == 0


async def test_who_leaves_while_it_pauses_leaves_nothing(
    make_house: Any, decode: FakeDecode
) -> None:
    house = await make_house(FakePrefill(), decode)
    await (await stalled(house, decode)).aclose()
    await until(lambda: bool(decode.aborted))
    assert house.assembly.dispatcher.num_running == 0


async def test_what_pauses_may_lose_its_blocks(make_house: Any, decode: FakeDecode) -> None:
    """Its ticket is taken back: it is computed again once its client reads on, and not before."""
    prefill = FakePrefill()
    house = await make_house(prefill, decode)
    deltas = await stalled(house, decode)
    decode.take_back("r1")
    await Call(house.gateway, asked("r2")).result()
    assert len(prefill.submitted) == 2
    tokens = [token async for delta in deltas for token in delta.token_ids]
    assert tokens == expected(PROMPT, NUM_TOKENS)[1:]
    assert [ticket.request_id for ticket in prefill.submitted] == ["r1", "r2", "r1"]


async def test_who_reads_nothing_for_a_while_pauses(
    make_house: Any, decode: FakeDecode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with few tokens unread: a slow decode would keep its slot for minutes until there are
    many. It goes on when it reads."""
    monkeypatch.setattr(output, "PAUSE_UNREAD_TOKENS", 1_000_000)
    monkeypatch.setattr(output, "PAUSE_AFTER_S", 0.0)
    house = await make_house(FakePrefill(), decode)
    async with aclosing(await stalled(house, decode)) as deltas:
        await Call(house.gateway, asked("r2")).result()
        assert not decode.running
        tokens = [token async for delta in deltas for token in delta.token_ids]
    assert tokens == expected(PROMPT, NUM_TOKENS)[1:]
