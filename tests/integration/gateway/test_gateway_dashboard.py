"""The dashboard over HTTP, with a gateway and fake workers: the contents of its feed, and what it
keeps secret."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from rich.console import Console

from quire.cli.state.top import TopFlags, read_document, render
from quire.v1 import block_manager_pb2 as pb
from services.gateway.access.keyring import Keyring
from services.gateway.access.local_only import DashboardSetting
from services.gateway.dashboard.document import DashboardDocument
from services.gateway.dashboard.routes import Dashboard
from services.gateway.http.app import create_app
from services.gateway.http.middleware.authentication import PAGE
from services.gateway.http.server import http_server
from services.runtime.errors import PromptTooLong, Unavailable
from tests.api_keys import ALICE, OPERATOR, keyring, keyring_of, text_of
from tests.integration.gateway.conftest import Call, GatewayHarness, asked
from tests.integration.gateway.fakes.decode import FakeDecode
from tests.integration.gateway.fakes.prefill import FakePrefill

SECRET_TEXT = "my secret prompt"


class FakeBlockManager:
    """In the place of the relay: one pool with 4 blocks in a cell."""

    def __init__(self) -> None:
        self.is_there = True
        self.num_cells = 0
        self.asked: list[str] = []
        self.num_retained = 0

    async def send(self, method: str, request: bytes, timeout_s: float | None) -> bytes:
        if not self.is_there:
            raise Unavailable("the block manager is not there")
        self.asked.append(method)
        if method == "DescribeBlocks":
            block = pb.Block(block_id=5, state="held", num_holders=1, prefix_hash=b"\x0f" * 16)
            return pb.DescribeBlocksResponse(blocks=[block]).SerializeToString()
        if method == "Audit":
            return pb.AuditResponse().SerializeToString()
        self.num_cells += 1
        used = range(1, self.num_cells + 1)
        cells = [pb.BlockCell(index=index, num_held=2, num_cached=1) for index in used]
        pool = pb.Pool(pool_id="pool", model="toy", num_blocks=400, num_free=300)
        pool.num_retained = self.num_retained
        block_map = pb.BlockMap(pool=pool, cells=cells)
        return pb.WatchBlocksResponse(maps=[block_map]).SerializeToString()


class Page:
    def __init__(
        self, http: httpx.AsyncClient, manager: FakeBlockManager, document: DashboardDocument
    ) -> None:
        self.http, self.manager, self.of_gateway = http, manager, document
        self.bytes = b""

    async def documents(self) -> AsyncIterator[dict[str, Any]]:
        """The document after each update."""
        async with self.http.stream("GET", "/dashboard/feed") as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                self.bytes += line.encode()
                if line.startswith("data: "):
                    yield json.loads(line.removeprefix("data: "))

    async def until(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        async for document in self.documents():
            if holds(document):
                return document
        raise AssertionError("the feed has ended")


@asynccontextmanager
async def dashboard(
    harness: GatewayHarness, setting: DashboardSetting = "auto", keys: Keyring | None = None
) -> AsyncIterator[Page]:
    manager: Any = FakeBlockManager()
    metrics = harness.metrics.metrics
    shown = Dashboard(setting, harness.assembly, metrics, manager, host="127.0.0.1", keyring=keys)
    routes = shown.routes()
    app = create_app(harness.gateway, CollectorRegistry(), keyring=keys, more_routes=routes)
    async with http_server(app, "127.0.0.1", 0, grace_s=0) as port:
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, timeout=10, trust_env=False) as http:
            yield Page(http, manager, shown.document)
        shown.feed.close()


@pytest.fixture
async def page(harness: GatewayHarness) -> AsyncIterator[Page]:
    async with dashboard(harness) as page:
        yield page


async def test_quire_top_shows_what_the_feed_tells(harness: Any, page: Page) -> None:
    await Call(harness.gateway, asked("r1")).task
    url = str(page.http.base_url)
    document = await asyncio.to_thread(read_document, TopFlags(url=url))
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(render(document))
    text = console.export_text()
    for shown in ("toy", "0 running", "pool", "prefill", "decode", "r1", "length"):
        assert shown in text


async def test_retained_prefixes_are_shown_by_name(harness: Any, page: Page) -> None:
    for owner in ("~", "acme"):
        await harness.store.retain("pool", owner, "p", 60_000, [b"h" * 16], (9, 9))
    page.manager.num_retained = 1
    document = await page.until(lambda now: bool(now["pools"]))
    pool = document["pools"]["pool"]
    assert (pool["retained"], pool["names"]) == (1, ["acme/p", "p"])


async def test_feed_follows_a_request_from_its_queue_to_its_end(harness: Any, page: Page) -> None:
    _, decode = harness.workers
    decode.pause_after = 2
    call = Call(harness.gateway, asked("r1", 8))
    document = await page.until(
        lambda now: any(view["tokens"] == 2 for view in now["requests"].values())
    )
    (running,) = document["requests"].values()
    assert running["id"] == "r1"
    assert [span[0] for span in running["spans"]] == [*("waiting", "prefill", "hand-off", "decode")]
    assert running["spans"][-1][2] == decode.worker_id
    assert (document["num_running"], document["num_waiting"]) == (1, 0)
    assert document["workers"][decode.worker_id]["state"] == "serving"
    decode.go_on(8)
    await call.result()
    document = await page.until(lambda now: now["num_running"] == 0)
    (ended,) = document["requests"].values()
    assert (ended["outcome"], ended["tokens"]) == ("length", 8)
    assert ended["ended_ms"] >= ended["spans"][-1][1]
    assert sum(document["ttft"]["counts"]) == 1
    assert document["generated_tokens"] == 8


async def test_a_request_without_a_token_waits_also_at_a_prefill_worker(
    harness: Any, page: Page
) -> None:
    prefill, _ = harness.workers
    prefill.holds = True
    call = Call(harness.gateway, asked("r1", 8))
    document = await page.until(
        lambda now: any(view["spans"][-1][0] == "prefill" for view in now["requests"].values())
    )
    (request,) = document["requests"].values()
    assert (document["num_running"], document["num_waiting"]) == (0, 1)
    assert document["oldest_wait_ms"] == document["now_ms"] - request["spans"][0][1]
    prefill.let_go()
    await call.result()
    document = await page.until(lambda now: now["num_waiting"] == 0)
    assert document["oldest_wait_ms"] == 0


async def test_errors_and_the_last_minutes_are_shown(harness: Any, page: Page) -> None:
    """Also those from before somebody looked."""
    await Call(harness.gateway, asked("r1", 8)).result()
    with pytest.raises(PromptTooLong):
        await Call(harness.gateway, asked("r2", 8, prompt=(1,) * 100_000)).result()
    keeping = asyncio.create_task(page.of_gateway.keep_history())
    document = await page.until(lambda now: bool(now["history"]))
    keeping.cancel()
    assert document["failures"] == {"context_length_exceeded": 1}
    ((at_ms, *figures),) = document["history"]
    assert figures == [0, 0, 8, 1]
    assert at_ms <= document["now_ms"]


async def test_feed_has_no_text_of_prompts_and_answers(harness: Any, page: Page) -> None:
    call = Call(harness.gateway, asked("r1", 8, prompt=SECRET_TEXT))
    await call.result()
    await page.until(lambda now: bool(now["requests"]))
    assert b'"r1"' in page.bytes
    assert SECRET_TEXT.encode() not in page.bytes
    assert call.text.encode() not in page.bytes


async def test_cells_survive_the_block_managers_absence(
    page: Page,
) -> None:
    document = await page.until(lambda now: len(now["pools"]["pool"]["cells"]) == 3)
    assert document["pools"]["pool"]["cells"]["2"] == [0, 1, 2, 0, 0, 0, 0]
    page.manager.is_there = False
    document = await page.until(lambda now: not now["block_manager"])
    assert len(document["pools"]["pool"]["cells"]) >= 3


async def test_lost_worker_stays_listed_as_gone(make_harness: Any) -> None:
    harness, decode = await make_harness(FakePrefill()), FakeDecode()
    server = await harness.announce(decode)
    async with dashboard(harness) as page:
        await page.until(lambda now: decode.worker_id in now["workers"])
        watching = page.documents()
        await anext(watching)
        await server.stop()
        await harness.registry.withdraw(decode.worker_id)
        async for document in watching:
            if document["workers"][decode.worker_id]["state"] == "gone":
                break
        await watching.aclose()  # type: ignore[attr-defined]


async def test_worker_that_does_not_answer_has_neither_load_nor_slots(make_harness: Any) -> None:
    """Otherwise the page counts slots that no request can get."""
    harness, decode = await make_harness(FakePrefill()), FakeDecode()
    server = await harness.announce(decode)

    def shown(now: dict[str, Any]) -> Any:
        return now["workers"].get(decode.worker_id, {})

    async with dashboard(harness) as page:
        await page.until(lambda now: shown(now).get("slots", 0) > 0)
        await server.stop()
        worker = shown(await page.until(lambda now: shown(now)["state"] == "unreachable"))
    loads = ("running", "slots", "free_slots", "pending_tokens")
    assert {name: worker[name] for name in loads} == dict.fromkeys(loads, 0)


async def test_page_answers_questions_about_blocks_and_audits(harness: Any) -> None:
    async with dashboard(harness, keys=keyring()) as page:
        page.http.headers["Authorization"] = f"Bearer {OPERATOR}"
        answer = await page.http.get("/dashboard/blocks", params={"pool": "pool", "cell": "1"})
        assert answer.json()[0] == {
            "id": 5,
            "state": "held",
            "num_holders": 1,
            "prefix_hash": "0f" * 16,
            "cached_at": None,
            "holders": [],
        }
        for wrong in ({}, {"pool": "pool"}, {"pool": "pool", "cell": "-1"}, {"cell": "x"}):
            answer = await page.http.get("/dashboard/blocks", params=wrong)
            assert answer.status_code == 400, wrong
        assert (await page.http.post("/dashboard/audit")).status_code == 400  # another site's form
        headers = {"X-Quire-Dashboard": "1"}
        assert (await page.http.post("/dashboard/audit", headers=headers)).status_code == 200
        assert page.manager.asked.count("Audit") == 1
        page.manager.is_there = False
        assert (await page.http.post("/dashboard/audit", headers=headers)).status_code == 503


async def test_page_and_its_files_forbid_what_they_do_not_need(page: Page) -> None:
    for path in ("/", *(f"/dashboard/{file.name}" for file in PAGE.iterdir())):
        answer = await page.http.get(path)
        assert answer.status_code == 200, path
        policy = answer.headers["content-security-policy"]
        assert "unsafe" not in policy
        for part in ("default-src 'none'", "script-src 'self'", "frame-ancestors 'none'"):
            assert part in policy
    for path in ("/dashboard/nothing.js", "/dashboard/..%2froutes.py", "/dashboard/"):
        assert (await page.http.get(path)).status_code == 404, path


@pytest.mark.parametrize(("setting", "status"), [("auto", 403), ("on", 200), ("off", 404)])
async def test_setting_decides_who_sees_it(
    harness: Any, setting: DashboardSetting, status: int
) -> None:
    """Also a page of another site whose name resolves to this host."""
    headers = {"Host": "rebound.example"}
    async with dashboard(harness, setting) as page:
        async with page.http.stream("GET", "/dashboard/feed", headers=headers) as answer:
            assert answer.status_code == status
        answer = await page.http.get("/dashboard/blocks?pool=pool&cell=0", headers=headers)
        assert answer.status_code == status


@pytest.mark.parametrize("setting", ["auto", "on"])
async def test_the_dashboard_needs_an_operators_key_if_there_are_keys(
    harness: Any, setting: DashboardSetting
) -> None:
    """This host's user too. The page itself contains no secrets, and asks for the key."""
    asked = (("GET", "feed"), ("GET", "blocks?pool=pool&cell=0"), ("POST", "audit"))
    async with dashboard(harness, setting, keyring()) as page:
        for path in ("/", "/dashboard/main.js", "/dashboard/style.css"):
            assert (await page.http.get(path)).status_code == 200
        for secret, status in ((None, 401), ("wrong", 401), (ALICE, 403), (OPERATOR, 200)):
            headers = {"X-Quire-Dashboard": "1"}
            headers |= {"Authorization": f"Bearer {secret}"} if secret else {}
            for method, path in asked:
                url = f"/dashboard/{path}"
                async with page.http.stream(method, url, headers=headers) as answer:
                    assert answer.status_code == status, (path, secret)


async def test_the_feed_ends_when_its_key_is_revoked(harness: Any, tmp_path: Path) -> None:
    """A stream that began with a valid key must not go on for ever."""
    file = tmp_path / "keys.json"
    file.write_text(text_of())
    ring = keyring_of(file, CollectorRegistry())
    async with dashboard(harness, keys=ring) as page:
        headers = {"Authorization": f"Bearer {OPERATOR}"}
        async with page.http.stream("GET", "/dashboard/feed", headers=headers) as answer:
            parts = answer.aiter_bytes()
            assert await anext(parts)
            file.write_text('{"keys": []}')
            ring.reload_if_changed()
            async with asyncio.timeout(10):
                assert [part async for part in parts] == []
