"""Deadlines with the same tick are due at the same time."""

import asyncio

import pytest

from services.runtime.ticks import until_tick


@pytest.mark.parametrize(
    ("now", "interval_s", "pause_s"),
    [
        (100.0, 1.0, 1.0),
        (100.4, 1.0, 0.6),
        (100.4, 0.5, 0.1 + 0.5),  # the next tick is almost now
        (100.3, 0.5, 0.2),
        (100.9999, 1.0, 1.0001),
    ],
)
async def test_pauses_end_with_a_tick(
    monkeypatch: pytest.MonkeyPatch, now: float, interval_s: float, pause_s: float
) -> None:
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
    pause = until_tick(interval_s)
    monkeypatch.undo()
    assert pause == pytest.approx(pause_s)
