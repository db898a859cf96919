"""The other routes: models, health, metrics; and request ids."""

import httpx
import openai
import pytest
from prometheus_client import CollectorRegistry

from services.gateway.http.app import create_app
from services.gateway.http.server import http_server
from services.runtime import errors

from .conftest import HI, FakeGenerator

MINE = {"prompt": "a", "request_id": "mine"}


async def test_models_are_listed(client: openai.AsyncOpenAI) -> None:
    (model,) = [model async for model in await client.models.list()]
    assert (model.id, model.object, model.owned_by) == ("org/tiny", "model", "quire")
    assert model.model_extra is not None
    assert model.model_extra.pop("created_at").endswith("+00:00")
    assert model.model_extra == {
        "root": "org/tiny",
        "max_model_len": 512,
        "block_size": 16,
        "dtype": "float32",
        "type": "model",
        "display_name": "org/tiny",
        "max_input_tokens": 512,
    }
    assert (await client.models.retrieve("org/tiny")).id == model.id


async def test_health_follows_the_generator(
    http: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    assert (await http.get("/health")).status_code == 200
    generator.is_ready = False
    assert (await http.get("/health")).status_code == 503


async def test_metrics_are_prometheus_text(http: httpx.AsyncClient) -> None:
    answer = await http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert "quire:prompt_tokens_total 7.0" in answer.text


async def test_the_request_id_comes_back(http: httpx.AsyncClient, generator: FakeGenerator) -> None:
    """The client's own id, or a generated one. The generator gets a new id for each retry, unless
    the body names the request: then that is its only id."""
    headers = {"X-Request-Id": "trace-1"}
    for _ in range(2):
        answer = await http.post("/v1/chat/completions", json=HI, headers=headers)
        assert answer.headers["x-request-id"] == "trace-1"
    first, second = (request.request_id for request in generator.requests)
    assert first != second
    assert first.startswith("trace-1-")
    for given in (headers, {}):
        answer = await http.post("/v1/completions", json=MINE, headers=given)
        assert answer.headers["x-request-id"] == generator.requests[-1].request_id == "mine"
    drawn = await http.get("/health", headers={"X-Request-Id": "not usable"})
    assert len(drawn.headers["x-request-id"]) == 24


@pytest.mark.parametrize(
    ("host", "reached_at"), [("::", ("127.0.0.1", "[::1]")), ("::1", ("[::1]",))]
)
async def test_an_ipv6_address_serves(
    generator: FakeGenerator, host: str, reached_at: tuple[str, ...]
) -> None:
    """`::` serves IPv4 too. Its clients have their IPv4 addresses."""
    app = create_app(generator, CollectorRegistry())
    serving, client = http_server(app, host, 0, grace_s=1), httpx.AsyncClient(trust_env=False)
    async with serving as port, client as http:
        for address in reached_at:
            answer = await http.post(f"http://{address}:{port}/v1/chat/completions", json=HI)
            assert answer.status_code == 200
    hosts = [request.caller.client for request in generator.requests]
    assert hosts == [address.strip("[]") for address in reached_at]


async def test_a_port_in_use_is_a_startup_error(url: str, generator: FakeGenerator) -> None:
    app, port = create_app(generator, CollectorRegistry()), int(url.rpartition(":")[2])
    with pytest.raises(errors.StartupError, match=f"HTTP: cannot listen on 127.0.0.1:{port}"):
        async with http_server(app, "127.0.0.1", port):
            pass
