"""The usage of tenants since a time: the difference between snapshots of each source."""

from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from services.gateway.access.caller import EVERYONE, Caller, bind_caller
from services.gateway.http.usage import usage_route
from services.runtime.usage import Used, used_since, write_usage
from tests.memory_registry import MemoryRegistry

BEGAN_S = 6000.0
"""The beginning of minute 100."""


class Time:
    """The clock of `time.time`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = BEGAN_S
        monkeypatch.setattr("time.time", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


async def test_usage_is_what_counters_grew(clock: Time) -> None:
    """To the minute; from the beginning of a source that is younger; of all sources together; also
    of a process that is gone, or another one that goes on with the same counters."""
    registry = MemoryRegistry()
    for second in range(0, 300, 5):
        clock.now_s = BEGAN_S + 30 + second
        used = {"acme": Used(0, 2 * second, second, 1), "beta": Used(0, second // 200, 0, 0)}
        await write_usage(registry, "gateway-1", BEGAN_S + 30, used)
        await write_usage(registry, "pool", BEGAN_S - 9999, {"acme": Used(second * 1000)})

    everything = await used_since(registry, BEGAN_S)
    assert everything["beta"] == Used(0, 1, 0, 0)
    assert everything["acme"][1:] == (590, 295, 1)
    assert (await used_since(registry, BEGAN_S + 200))["acme"] == Used(150_000, 300, 150, 0)
    assert (await used_since(registry, clock.now_s + 120)) == {}
    await write_usage(registry, "late", BEGAN_S + 290, {"acme": Used(7)})  # began in minute 104
    assert (await used_since(registry, BEGAN_S + 300))["acme"].block_ms == 30_000 + 7


@pytest.mark.parametrize(
    ("caller", "tenants"),
    [
        (Caller("ops", "ops", is_operator=True), ["acme", "~"]),
        (Caller("alice", "acme"), ["acme"]),
        (Caller("bob", "beta"), []),
        (EVERYONE, ["~"]),
    ],
)
async def test_only_operators_see_other_tenants(
    clock: Time, caller: Caller, tenants: list[str]
) -> None:
    registry = MemoryRegistry()
    used = {"~": Used(500), "acme": Used(1500, 30, 10, 5)}
    await write_usage(registry, "gateway-1", BEGAN_S, used)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        bind_caller(caller)
        await Starlette(routes=[usage_route(registry)])(scope, receive, send)

    client = TestClient(app)
    answer = client.get("/v1/usage", params={"since": BEGAN_S}).json()
    assert [each["tenant"] for each in answer["data"]] == tenants
    assert (answer["since"], answer["until"]) == (6000, 6000)
    if "acme" in tenants:
        assert answer["data"][0] == {
            **{"tenant": "acme", "block_seconds": 1.5, "completion_tokens": 5},
            **{"prompt_tokens": 30, "cached_tokens": 10},
        }
    assert client.get("/v1/usage", params={"since": "noon"}).status_code == 400


@pytest.mark.parametrize(
    ("ago_s", "message"),
    [
        (24 * 3600 + 59, ""),
        (-59, ""),
        (48 * 3600, "usage is kept for 24 hours, and since is 48.0 hours ago"),
        (-61, "since is in the future"),
    ],
)
async def test_a_time_without_usage_is_refused(clock: Time, ago_s: int, message: str) -> None:
    """The clock of a client may differ by a minute."""
    client = TestClient(Starlette(routes=[usage_route(MemoryRegistry())]))
    answer = client.get("/v1/usage", params={"since": clock.now_s - ago_s})
    assert answer.status_code == (400 if message else 200)
    assert message in answer.text
