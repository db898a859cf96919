"""A channel that is kept between calls."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from services.runtime.rpc import kept_channel
from services.runtime.rpc.kept_channel import KeptChannel


@dataclass(eq=False)
class FakeChannel:
    closed: list[float | None] = field(default_factory=list)

    async def close(self, grace: float | None = None) -> None:
        self.closed.append(grace)


@dataclass
class FakeTls:
    version: int = 1


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[FakeChannel]:
    channels: list[FakeChannel] = []

    def open_channel(_address: str, _tls: Any) -> FakeChannel:
        channels.append(FakeChannel())
        return channels[-1]

    monkeypatch.setattr(kept_channel, "open_channel", open_channel)
    return channels


async def test_a_channel_is_kept_until_the_tls_files_change(opened: list[FakeChannel]) -> None:
    tls: Any = FakeTls()
    kept = KeptChannel("host:1", tls)
    assert kept.get() is kept.get()
    tls.version = 2
    new: Any = kept.get()
    await asyncio.sleep(0)
    assert [new is channel for channel in opened] == [False, True]
    assert [channel.closed for channel in opened] == [[30.0], []]  # its calls go on


async def test_a_closed_channel_ends_its_calls(opened: list[FakeChannel]) -> None:
    kept = KeptChannel("host:1", None)
    await kept.close()
    assert opened == []
    kept.get()
    await kept.close()
    assert opened[0].closed == [None]
