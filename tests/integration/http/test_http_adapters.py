"""Adapters over HTTP: what the audit log says about them."""

from typing import Any

import httpx
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from services.gateway.http.adapters import adapter_routes
from services.gateway.http.app import create_app
from services.gateway.http.server import http_server
from services.runtime.errors import InvalidRequest
from tests.api_keys import ALICE, OPERATOR, keyring

from .conftest import LIMIT_S, FakeGenerator


class FakeAdapters:
    async def load(self, name: str, directory: str, model: str, replaces: bool) -> None:
        if directory == "/nowhere":
            raise InvalidRequest("nothing is there")

    async def unload(self, name: str) -> None:
        pass


async def test_each_change_of_adapters_leaves_a_line(generator: FakeGenerator) -> None:
    adapters: Any = FakeAdapters()
    routes = adapter_routes(adapters)
    app = create_app(generator, CollectorRegistry(), more_routes=routes, keyring=keyring())
    good = {"lora_name": "poet", "lora_path": "/poet"}
    asks = [
        ("load", ALICE, good),
        ("load", OPERATOR, good),
        ("load", OPERATOR, {**good, "lora_path": "/nowhere"}),
        ("unload", OPERATOR, {"lora_name": "poet"}),
    ]
    async with http_server(app, "127.0.0.1", 0, grace_s=1) as port:
        url = f"http://127.0.0.1:{port}/v1/"
        async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S, trust_env=False) as client:
            with capture_logs() as logs:
                for verb, key, body in asks:
                    headers = {"Authorization": f"Bearer {key}"}
                    await client.post(f"{verb}_lora_adapter", json=body, headers=headers)
    refused, *done = logs
    assert (refused["event"], refused["operator"]) == ("operation_refused", "alice")
    assert [(line["operator"], line["method"], line["outcome"]) for line in done] == [
        ("root", "LoadAdapter", "ok"),
        ("root", "LoadAdapter", "invalid_request"),
        ("root", "UnloadAdapter", "ok"),
    ]
    assert done[0]["target"]["lora_path"] == "/poet"
