"""Pages of other sites, which can make a browser send requests to a server on its own host."""

import json

import pytest
from structlog.testing import capture_logs

from .conftest import HI, FakeGenerator, asking

EVIL, FRIEND = "https://evil.example.com", "https://friend.example.com"
FORM = {"Content-Type": "text/plain"}
"""A form's type, for which browsers ask no permission (CORS)."""


@pytest.mark.parametrize(
    ("site", "origin", "allowed", "status"),
    [
        ("cross-site", EVIL, [], 403),
        ("same-site", "http://localhost:3000", [], 403),
        ("cross-site", EVIL, [FRIEND], 403),
        ("cross-site", FRIEND, [FRIEND], 200),
        ("cross-site", EVIL, ["*"], 200),
        ("same-origin", EVIL, [], 200),
        ("none", None, [], 200),
        (None, EVIL, [], 200),
    ],
)
async def test_a_page_of_another_site_computes_nothing(
    generator: FakeGenerator, site: str | None, origin: str | None, allowed: list[str], status: int
) -> None:
    headers = {**FORM, **({"Sec-Fetch-Site": site} if site else {})}
    headers |= {"Origin": origin} if origin else {}
    async with asking(generator, cors_origins=allowed) as client:
        body = json.dumps(HI)
        with capture_logs() as logs:
            answer = await client.post("/v1/chat/completions", content=body, headers=headers)
        page = await client.get("/health", headers=headers)
    assert (answer.status_code, page.status_code) == (status, 200)
    assert len(generator.requests) == (status == 200)
    if status == 403:
        assert answer.json()["error"]["code"] == "permission_denied"
        (refused,) = logs
        assert refused["event"] == "operation_refused"
        assert refused["reason"] == answer.json()["error"]["message"]
