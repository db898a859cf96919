"""API keys over HTTP."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.routing import Route
from structlog.testing import capture_logs

from services.gateway.http.adapters import adapter_routes
from services.gateway.http.app import create_app
from services.gateway.http.middleware.authentication import (
    OPEN_PATHS,
    OPERATION_PATHS,
    OPERATOR_PATHS,
    PAGE,
)
from services.gateway.http.server import http_server
from services.runtime.errors import InvalidRequest
from tests.api_keys import ALICE, BOB, OPERATOR, keyring

from .conftest import HI, LIMIT_S, FakeGenerator, asking


@pytest.fixture
def app(generator: FakeGenerator) -> Starlette:
    return create_app(generator, CollectorRegistry(), keyring=keyring())


@pytest.fixture
async def keyed(app: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    async with http_server(app, "127.0.0.1", 0, grace_s=1) as port:
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S, trust_env=False) as client:
            yield client


def as_(key: str) -> dict[str, Any]:
    return {"headers": {"Authorization": f"Bearer {key}"}}


def test_open_paths_are_few() -> None:
    page = {f"/dashboard/{file.name}" for file in PAGE.iterdir()}
    assert {"/health", "/", *page} == OPEN_PATHS
    assert not page & {"/dashboard/feed", "/dashboard/blocks", "/dashboard/audit"}


async def test_a_key_may_stand_in_anthropics_header(keyed: httpx.AsyncClient) -> None:
    for key, status in ((ALICE, 200), ("wrong", 401)):
        answer = await keyed.get("/v1/models", headers={"x-api-key": key})
        assert answer.status_code == status


async def test_no_route_is_reachable_without_a_key(
    app: Starlette, keyed: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    """Every route of the application, with every method."""
    paths = {
        (route.path.replace("{model:path}", "org/tiny"), method)
        for route in app.routes
        if isinstance(route, Route)
        for method in route.methods or ()
    }
    assert len(paths) >= 8
    assert len(app.routes) == len({path for path, _ in paths}), "a kind of route with no test"
    for path, method in paths | {("/nothing", "GET"), ("/health/", "GET"), ("/health//", "GET")}:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": ALICE}):
            answer = await keyed.request(method, path, headers=headers, json=HI)
            if path in OPEN_PATHS:
                assert answer.status_code == 200
                continue
            assert answer.status_code == 401, (method, path)
            assert answer.headers["www-authenticate"] == "Bearer"
            if method != "HEAD":
                name = ("type", "authentication_error")
                name = name if path.startswith("/v1/messages") else ("code", "invalid_api_key")
                assert answer.json()["error"][name[0]] == name[1]
    assert not generator.requests


async def test_a_path_for_operators_refuses_users(keyed: httpx.AsyncClient) -> None:
    for path in OPERATOR_PATHS:
        answer = await keyed.get(path, **as_(BOB))
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "permission_denied")
        assert (await keyed.get(path, **as_(OPERATOR))).status_code == 200


async def test_the_request_has_its_caller(
    keyed: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    assert (await keyed.post("/v1/chat/completions", json=HI, **as_(BOB))).status_code == 200
    caller = generator.requests[0].caller
    assert (caller.key, caller.tenant, caller.is_operator) == ("bob", "bobs", False)


async def test_without_keys_a_client_is_its_address(
    http: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    """A proxy on the same host may say whom it speaks for."""
    for headers in ({}, {"X-Forwarded-For": "192.0.2.7"}):
        await http.post("/v1/chat/completions", json=HI, headers=headers)
    assert [each.caller.client for each in generator.requests] == ["127.0.0.1", "192.0.2.7"]
    assert not any(each.caller.is_operator for each in generator.requests)


@pytest.mark.parametrize("path", sorted(OPERATION_PATHS))
async def test_without_keys_nobody_operates_over_http(http: httpx.AsyncClient, path: str) -> None:
    """Behind nginx with `proxy_pass` alone, every client seems to be this host's user."""
    headers = {"Host": "127.0.0.1:8000", "X-Quire-Dashboard": "1"}
    answer = await http.post(path, json={"lora_name": "x", "lora_path": "/x"}, headers=headers)
    assert answer.status_code == 403
    assert "this gateway has no keys; this needs an operator's key" in answer.text


async def test_a_call_with_several_inputs_counts_once(generator: FakeGenerator) -> None:
    async with asking(generator, keyring=keyring(requests_per_minute=2)) as http:
        answers = [
            await http.post(f"/v1/{path}", json=body, **as_(ALICE))
            for path, body in (
                ("embeddings", {"input": ["a", "b", "c"]}),
                ("completions", {"prompt": ["a", "b", "c"]}),
                ("embeddings", {"input": ["a", "b", "c"]}),
            )
        ]
    assert [answer.status_code for answer in answers] == [200, 200, 429]


async def test_operators_routes_log_who_was_refused(keyed: httpx.AsyncClient) -> None:
    with capture_logs() as logs:
        await keyed.get("/metrics", **as_(BOB))
        await keyed.get("/" + "x" * 1000)
    denied, refused = logs
    assert (denied["event"], denied["operator"]) == ("operation_refused", "bob")
    assert denied["method"] == "/metrics"
    assert (refused["event"], len(refused["method"])) == ("login_refused", 200)


class FakeAdapters:
    async def load(self, name: str, directory: str, model: str, replaces: bool) -> None:
        if directory == "/nowhere":
            raise InvalidRequest("nothing is there")

    async def unload(self, name: str) -> None:
        pass


async def test_each_change_of_adapters_leaves_a_line(generator: FakeGenerator) -> None:
    adapters: Any = FakeAdapters()
    routes = adapter_routes(adapters)
    good = {"lora_name": "poet", "lora_path": "/poet"}
    asks = [
        ("load", ALICE, good),
        ("load", OPERATOR, good),
        ("load", OPERATOR, {**good, "lora_path": "/nowhere"}),
        ("unload", OPERATOR, {"lora_name": "poet"}),
    ]
    async with asking(generator, more_routes=routes, keyring=keyring()) as client:
        with capture_logs() as logs:
            for verb, key, body in asks:
                headers = {"Authorization": f"Bearer {key}"}
                await client.post(f"/v1/{verb}_lora_adapter", json=body, headers=headers)
    refused, *done = logs
    assert (refused["event"], refused["operator"]) == ("operation_refused", "alice")
    assert [(line["operator"], line["method"], line["outcome"]) for line in done] == [
        ("root", "LoadAdapter", "ok"),
        ("root", "LoadAdapter", "invalid_request"),
        ("root", "UnloadAdapter", "ok"),
    ]
    assert done[0]["target"]["lora_path"] == "/poet"
