"""The dashboard's feed: viewers that join, leave and are slow, and access."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from services.gateway.access.local_only import check_local
from services.gateway.dashboard.feed import MAX_VIEWERS, Feed
from services.runtime.errors import Overloaded
from tests.waiting import until

INTERVAL_S = 0.002


class Source:
    def __init__(self) -> None:
        self.num_built = 0
        self.error: Exception | None = None

    async def build(self) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        self.num_built += 1
        return {"number": self.num_built}


def parsed(event: bytes) -> Any:
    assert event.endswith(b"\n\n")
    return json.loads(event.removeprefix(b"event: whole\ndata: "))


async def to_the_end(events: AsyncGenerator[bytes, None]) -> None:
    async for _ in events:
        pass


async def test_nothing_is_built_while_nobody_views() -> None:
    source = Source()
    feed = Feed(source.build, INTERVAL_S)
    events = feed.events()
    await anext(events)
    await events.aclose()
    built = source.num_built
    await asyncio.sleep(0.02)
    assert source.num_built == built
    again = feed.events()
    assert parsed(await anext(again))["number"] > built
    await again.aclose()


async def test_all_viewers_get_the_same_bytes_of_one_update() -> None:
    source = Source()
    feed = Feed(source.build, INTERVAL_S)
    one, other = feed.events(), feed.events()
    await asyncio.gather(anext(one), anext(other))
    first, second = await asyncio.gather(anext(one), anext(other))
    assert parsed(first) == {"number": source.num_built}
    assert first is second
    await one.aclose()
    await other.aclose()


async def test_slow_viewer_skips_updates() -> None:
    source = Source()
    feed = Feed(source.build, INTERVAL_S)
    slow = feed.events()
    await anext(slow)
    missed = source.num_built + 3
    await until(lambda: source.num_built >= missed)
    assert parsed(await anext(slow))["number"] >= missed
    await slow.aclose()


async def test_fault_of_the_document_reaches_every_viewer_and_ends_with_it() -> None:
    source = Source()
    feed = Feed(source.build, INTERVAL_S)
    events = feed.events()
    await anext(events)
    source.error = RuntimeError("broken")
    with pytest.raises(RuntimeError, match="broken"):
        await to_the_end(events)
    source.error = None
    again = feed.events()
    assert parsed(await anext(again)) == {"number": source.num_built}
    await again.aclose()


async def test_closing_ends_all_streams_and_refuses_no_late_viewer_with_an_error() -> None:
    feed = Feed(Source().build, INTERVAL_S)
    events = feed.events()
    await anext(events)
    feed.close()
    assert [event async for event in events][1:] == []
    assert [event async for event in feed.events()] == []


async def test_viewers_have_a_limit() -> None:
    feed = Feed(Source().build, INTERVAL_S)
    viewers = [feed.events() for _ in range(MAX_VIEWERS)]
    for viewer in viewers:
        await anext(viewer)
    with pytest.raises(Overloaded, match="32 pages"):
        await anext(feed.events())
    for viewer in viewers:
        await viewer.aclose()
    late = feed.events()
    await anext(late)
    await late.aclose()


def request(version: str = "1.1", **headers: str) -> Request:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "http_version": version, "headers": raw})


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "LOCALHOST:80", "[::1]:8000"])
def test_users_of_the_host_see_the_dashboard(host: str) -> None:
    for listens_at in ("127.0.0.1", "::1", "localhost"):
        check_local(request(host=host), listens_at)


@pytest.mark.parametrize(
    ("listens_at", "version", "headers"),
    [
        ("0.0.0.0", "1.1", {"host": "127.0.0.1:8000"}),
        ("192.0.2.1", "1.1", {"host": "127.0.0.1:8000"}),
        ("127.0.0.1", "1.1", {"host": "rebound.example:8000"}),
        ("127.0.0.1", "1.1", {"host": "127.0.0.1.example"}),
        ("127.0.0.1", "1.1", {}),
        ("127.0.0.1", "1.1", {"host": "127.0.0.1", "x_forwarded_for": "192.0.2.1"}),
        ("127.0.0.1", "1.1", {"host": "127.0.0.1", "forwarded": "for=192.0.2.1"}),
        ("127.0.0.1", "1.1", {"host": "127.0.0.1", "via": "1.1 proxy"}),
        ("127.0.0.1", "1.0", {"host": "127.0.0.1"}),  # nginx with `proxy_pass` alone
    ],
)
def test_other_users_do_not_see_the_dashboard(
    listens_at: str, version: str, headers: dict[str, str]
) -> None:
    with pytest.raises(HTTPException, match="only for this host"):
        check_local(request(version, **headers), listens_at)
