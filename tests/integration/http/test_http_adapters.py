"""Adapters over HTTP: what the audit log says about them."""

from typing import Any

from structlog.testing import capture_logs

from services.gateway.http.adapters import adapter_routes
from services.runtime.errors import InvalidRequest
from tests.api_keys import ALICE, OPERATOR, keyring

from .conftest import FakeGenerator, asking


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
