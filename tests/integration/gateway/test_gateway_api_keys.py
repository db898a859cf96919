"""API keys over gRPC, on a real gateway with fake workers."""

import asyncio
import json
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import Default
from grpc import aio
from prometheus_client import CollectorRegistry

from blockstore.store import tenant_of
from quire.sockets import living_sockets
from quire.v1 import inference_pb2_grpc
from quire.v1.block_manager_pb2 import DrainWorkerRequest, ListWorkersRequest
from quire.v1.block_manager_pb2_grpc import BlockManagerStub
from quire.v1.inference_pb2 import ListModelsRequest
from services.gateway.access.caller import Caller, bind_caller
from services.gateway.access.guards import KeyGuard
from services.gateway.api import GenerationRequest
from services.gateway.request.metrics import RequestMeters
from services.runtime.errors import RateLimited, UnknownModel
from services.runtime.metrics import MAX_TENANT_LABELS, OTHER_TENANTS
from services.runtime.rpc.transport import open_channel
from tests.api_keys import ALICE, BOB, OPERATOR, bearer, keyring, text_of

from .conftest import PROMPT
from .fakes import FakeDecode, FakePrefill
from .test_gateway_process import ALL_SERVICES, free_port, launch, services_at, stack
from .test_gateway_resume import message, tokens_of

__all__ = ["stack"]
REFUSED = grpc.StatusCode.UNAUTHENTICATED
DENIED = grpc.StatusCode.PERMISSION_DENIED


async def test_tenants_never_share_a_prefix_whatever_salt_they_send(make_harness: Any) -> None:
    """Bob sends as his salt the value that Alice's salt becomes."""
    prefill = FakePrefill()
    harness = await make_harness(prefill, FakeDecode(), report_cached_tokens=False)
    stub = await harness.serve(KeyGuard(keyring()))
    roots = []
    for number, (key, salt) in enumerate(((ALICE, "x"), (BOB, "x"), (BOB, "acme/x"), (BOB, ""))):
        asked = message(None, request_id=f"r{number}")
        asked.cache_salt = salt
        responses = [each async for each in stub.Generate(asked, metadata=bearer(key))]
        assert responses[-1].usage.HasField("num_cached_tokens")
        roots.append(bytes(prefill.submitted[-1].root_hash))
        tenant = "acme" if key == ALICE else "bobs"
        assert tenant_of(prefill.submitted[-1].holder_id) == tenant  # who is charged for the blocks
    assert len(set(roots)) == 4


@pytest.mark.parametrize(
    ("limits", "status", "code"),
    [
        ({"requests_per_minute": 1}, grpc.StatusCode.RESOURCE_EXHAUSTED, "rate_limit_exceeded"),
        ({"tokens_per_minute": 20}, grpc.StatusCode.RESOURCE_EXHAUSTED, "rate_limit_exceeded"),
        ({"models": ["other"]}, grpc.StatusCode.NOT_FOUND, "model_not_found"),
    ],
    ids=lambda value: str(value),
)
async def test_a_limit_ends_a_call_with_its_status(
    harness: Any, limits: dict[str, Any], status: Any, code: str
) -> None:
    """A request uses 15 tokens of its prompt and 8 of its answer. A model that a key may not use is
    treated as unknown, and the error lists no models."""
    stub = await harness.serve(KeyGuard(keyring(**limits)))
    if "models" not in limits:
        await tokens_of(stub.Generate(message(None), metadata=bearer(ALICE)))
    with pytest.raises(aio.AioRpcError) as error:
        await tokens_of(stub.Generate(message(None), metadata=bearer(ALICE)))
    trailers = dict(error.value.trailing_metadata() or ())
    assert (error.value.code(), trailers["quire-error-code"]) == (status, code)
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED:
        assert int(trailers["grpc-retry-pushback-ms"]) > 0
    else:
        assert "toy" not in str(error.value.details())
    await tokens_of(stub.Generate(message(None), metadata=bearer(BOB)))
    value = harness.request_metrics.get_sample_value
    assert value("quire:tenant_requests_total", {"tenant": "bobs", "outcome": "length"}) == 1
    assert value("quire:tenant_prompt_tokens_total", {"tenant": "bobs"}) == len(PROMPT)
    assert value("quire:tenant_generation_tokens_total", {"tenant": "bobs"}) == 8
    assert value("quire:tenant_requests_total", {"tenant": "acme", "outcome": code}) == 1


@pytest.mark.parametrize(
    ("allowed", "seen"),
    [({"toy"}, ["default", "toy"]), ({"default"}, ["default"]), ({"other"}, [])],
    ids=str,
)
async def test_a_key_sees_its_models_only_and_tokenizes_for_them(
    make_harness: Any, allowed: set[str], seen: list[str]
) -> None:
    """A key for a model may use its aliases too; a key for an alias may use only the alias."""
    harness = await make_harness(FakePrefill(), FakeDecode(), model_aliases=("default=toy",))
    gateway = harness.gateway
    bind_caller(Caller(models=frozenset(allowed)))
    assert [model.id for model in gateway.models()] == seen
    for name in ("", "toy", "default"):
        asked = GenerationRequest("Hi", model=name)
        if name in seen or (seen and not name):
            token_ids = (await gateway.tokenize(asked)).token_ids
            assert await gateway.detokenize(token_ids, name)
            continue
        with pytest.raises(UnknownModel):
            await gateway.tokenize(asked)
        with pytest.raises(UnknownModel):
            await gateway.detokenize((1,), name)


async def test_calls_for_tokens_count_as_requests(make_harness: Any) -> None:
    """They take a thread of the gateway, so a rate that left them out would be none."""
    gateway = (await make_harness(FakePrefill(), FakeDecode())).gateway
    bind_caller(keyring(requests_per_minute=2).account(f"Bearer {ALICE}").caller)
    await gateway.tokenize(GenerationRequest("Hi"))
    await gateway.detokenize((1,), "")
    with pytest.raises(RateLimited):
        await gateway.tokenize(GenerationRequest("Hi"))
    with pytest.raises(RateLimited):
        await gateway.detokenize((1,), "")


def test_tenants_beyond_the_limit_share_one_label() -> None:
    registry = CollectorRegistry()
    metrics = RequestMeters(registry)
    for number in range(MAX_TENANT_LABELS + 10):
        metrics.meter("toy", Caller(f"k{number}", f"t{number}")).first_token(0.1)
    count = "quire:tenant_time_to_first_token_seconds_count"
    assert registry.get_sample_value(count, {"tenant": "t0"}) == 1
    assert registry.get_sample_value(count, {"tenant": OTHER_TENANTS}) == 10
    assert registry.get_sample_value(count, {"tenant": f"t{MAX_TENANT_LABELS}"}) is None


@pytest.fixture
def launch_keyed(
    stack: AsyncExitStack, valkey: Any, short_path: Path, tmp_path: Path
) -> Callable[..., Any]:
    async def start(**more: Any) -> Any:
        path = tmp_path / "keys.json"
        path.write_text(text_of())
        return await launch(stack, valkey.url, short_path, API_KEYS_FILE=str(path), **more)

    return start


async def status_of(call: Any) -> grpc.StatusCode:
    try:
        await (call.read() if hasattr(call, "read") else call)
    except aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_no_method_is_reachable_without_a_key(launch_keyed: Any, short_path: Path) -> None:
    """Every method of every service that reflection lists, at each listener."""
    port = await free_port()
    gateway = await launch_keyed(OPERATIONS_PORT=str(port))
    for address in (gateway.address, f"127.0.0.1:{port}"):
        async with open_channel(address) as channel:
            services = await services_at(channel)
            assert services == ALL_SERVICES
            for service in services:
                for method in Default().FindServiceByName(service).methods:
                    name = f"/{service}/{method.name}"
                    streams = method.server_streaming
                    kind: Any = channel.unary_stream if streams else channel.unary_unary
                    for metadata in ((), bearer("wrong")):
                        assert await status_of(kind(name)(b"", metadata=metadata)) is REFUSED, name
                    as_user = await status_of(kind(name)(b"", metadata=bearer(ALICE)))
                    as_operator = await status_of(kind(name)(b"", metadata=bearer(OPERATOR)))
                    assert (as_user is DENIED) == (service != "quire.v1.Inference"), name
                    assert as_operator not in (DENIED, REFUSED), name
    (socket,) = living_sockets(short_path)
    async with open_channel(f"unix:{socket}") as channel:
        answer = BlockManagerStub(channel).ListWorkers(ListWorkersRequest())
        assert await status_of(answer) is grpc.StatusCode.UNAVAILABLE  # there is no block manager
        inference = inference_pb2_grpc.InferenceStub(channel)
        assert not (await inference.ListModels(ListModelsRequest())).models


async def test_operations_and_failed_logins_leave_lines(
    launch_keyed: Any, stack: AsyncExitStack, tmp_path: Path
) -> None:
    gateway = await launch_keyed(options={"stderr": asyncio.subprocess.PIPE}, LOG_FORMAT="json")
    async with open_channel(gateway.address) as channel:
        drain = BlockManagerStub(channel).DrainWorker
        for key in (OPERATOR, BOB, "wrong", "wrong"):
            await status_of(drain(DrainWorkerRequest(worker_id="w-1"), metadata=bearer(key)))
    (tmp_path / "keys.json").write_text("broken")
    lines: list[dict[str, Any]] = []
    async with asyncio.timeout(10):
        while not any(line["event"] == "api_keys_refused" for line in lines):
            lines.append(json.loads(await gateway.process.stderr.readline()))
    (drained,) = [line for line in lines if line["event"] == "operation_performed"]
    assert {key: drained[key] for key in ("operator", "method", "target", "outcome")} == {
        "operator": "root",
        "method": "DrainWorker",
        "target": {"worker_id": "w-1"},
        "outcome": "unavailable",
    }
    (denied,) = [line for line in lines if line["event"] == "operation_refused"]
    assert (denied["operator"], denied["method"]) == ("bob", "/quire.v1.BlockManager/DrainWorker")
    (refused,) = [line for line in lines if line["event"] == "login_refused"]
    assert refused["num_refused"] == 1
    assert OPERATOR not in str(lines)


async def test_a_gateway_with_a_broken_key_file_does_not_start(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text('{"keys": [{"name": "x"}]}')
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.gateway",
        "--check",
        env={"QUIRE_GATEWAY_API_KEYS_FILE": str(path)},
        stderr=asyncio.subprocess.PIPE,
    )
    _, stderr = await process.communicate()
    assert process.returncode == 2
    assert b"keys[0].hash: Field required" in stderr


async def test_web_pages_of_chosen_origins_may_call(launch_keyed: Any) -> None:
    gateway = await launch_keyed(CORS_ORIGINS="https://chat.example.com")
    for origin, is_chosen in (("https://chat.example.com", True), ("https://evil.test", False)):
        asked = {
            "Origin": origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        }
        preflight = await gateway.http.options("/v1/chat/completions", headers=asked)
        answer = await gateway.http.get("/v1/models", headers={"Origin": origin})
        assert (preflight.status_code, answer.status_code) == (200 if is_chosen else 400, 401)
        for each in (preflight, answer):
            allowed = each.headers.get("access-control-allow-origin")
            assert allowed == (origin if is_chosen else None)
            assert "access-control-allow-credentials" not in each.headers
