"""What a gateway with fake workers tells of requests: to whom, in answers and in sentences."""

import asyncio
import json
from typing import Any

import grpc
import httpx
import pytest

from quire.v1.inference_pb2 import ExplainRequest, GenerateRequest, TokenIds
from quire.v1.sampling_pb2 import SamplingParams
from services.gateway.access.caller import LOCAL_OPERATOR
from services.gateway.access.guards import KeyGuard
from tests.api_keys import ALICE, BOB, OPERATOR, bearer, keyring
from tests.waiting import until

from .conftest import PROMPT, Call, GatewayHarness, asked
from .fakes import FakeDecode, FakePrefill
from .test_gateway_dashboard import dashboard
from .test_gateway_migration import running_at

QUIRE = {
    *("queue_ms", "placement", "prefill_ms", "handoff_ms", "decode_ms", "cached_tokens"),
    *("preemptions", "moves"),
}
VLLM = {
    *("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms"),
    "tokens_per_second",
}


async def post(http: httpx.AsyncClient, path: str, **body: Any) -> list[dict[str, Any]]:
    """The parts of the answer, or the answer alone."""
    answer = await http.post(path, json={"max_tokens": 4, **body})
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return [answer.json()]
    data = [line.removeprefix("data: ") for line in answer.text.splitlines() if "{" in line]
    return [json.loads(each) for each in data if each.startswith("{")]


CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    "stream", [{}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}]
)
@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "Hi"})]
)
async def test_the_last_part_of_an_answer_has_the_figures(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], stream: dict[str, Any], n: int
) -> None:
    parts = await post(http, path, **body, **stream, n=n, include_metrics=True)
    assert not any("quire" in part for part in await post(http, path, **body, **stream))
    assert [("quire" in part, "metrics" in part) for part in parts] == [
        *[(False, False)] * (len(parts) - 1),
        (True, True),
    ]
    assert parts[-1]["quire"].keys() == QUIRE
    assert parts[-1]["metrics"].keys() == VLLM
    assert parts[-1]["quire"]["placement"] == ["prefill-1", "decode-1"]
    assert (parts[-1]["metrics"]["mean_itl_ms"] is None) == (n == 2)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/messages", CHAT), ("/v1/responses", {"input": "Hi", "max_tokens": None})],
)
async def test_messages_and_responses_have_the_figures_at_their_end(
    http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    (whole,) = await post(http, path, **body, include_metrics=True)
    parts = await post(http, path, **body, stream=True, include_metrics=True)
    assert "quire" not in (await post(http, path, **body))[0]
    ends = [each.get("response", each) for each in parts]
    (end,) = [each for each in ends if "quire" in each]
    assert end in (ends[-1], ends[-2])
    for told in (whole, end):
        assert (told["quire"].keys(), told["metrics"].keys()) == (QUIRE, VLLM)


async def test_a_setting_gives_them_to_every_answer(make_harness: Any) -> None:
    """To a response too; several prompts are several requests, and have none."""
    harness = await make_harness(FakePrefill(), FakeDecode(), per_request_metrics=True)
    async with harness.http() as http:
        (whole,) = await post(http, "/v1/responses", input="Hi", max_tokens=None)
        (several,) = await post(http, "/v1/completions", prompt=["Hi", "Ho"])
    assert whole["quire"].keys() == QUIRE
    assert "quire" not in several
    stub = await harness.serve()
    request = GenerateRequest(token_ids=TokenIds(ids=PROMPT), sampling=SamplingParams(max_tokens=2))
    *_, last = [each async for each in stub.Generate(request)]
    assert list(last.usage.metrics.placement) == ["prefill-1", "decode-1"]


def explained(harness: GatewayHarness, name: str) -> str:
    return "\n".join(harness.gateway.explain(name, LOCAL_OPERATOR))


async def test_waits_for_slots_and_moves_are_explained_with_their_causes(make_harness: Any) -> None:
    leaving, other = FakeDecode("leaving", num_slots=1), FakeDecode("other")
    harness = await make_harness(FakePrefill(), leaving)
    (moves,) = await running_at(harness, leaving, "r1")
    waits = Call(harness.gateway, asked("r2"))
    await until(lambda: len(harness.assembly.dispatcher.requests) == 2)
    await until(lambda: "waited for 1 decode slot: leaving had " in explained(harness, "r2"))
    assert "It has run for" in explained(harness, "r2")
    await harness.add(other)
    leaving.report(leaving.load, draining=True)
    await asyncio.gather(moves.result(), waits.result())
    assert "it moved from leaving to other, because leaving drains." in explained(harness, "r1")
    assert "For the decode it got slots at other: " in explained(harness, "r2")
    assert "outcome length: 8 tokens generated" in explained(harness, "r2")


async def test_a_forecast_changes_nothing(harness: Any) -> None:
    prefill, _ = harness.workers
    told = "\n".join(await harness.gateway.forecast(asked("r1")))
    assert "The prompt has 15 tokens: 1 block of 16 with the first new token." in told
    assert "The answer may have 8 tokens." in told
    assert "At the gateway no requests would wait before it." in told
    assert "The prefix cache has 0 of its tokens now." in told
    assert "it would go to prefill-1 (0 tokens before it and 15 of its own" in told
    assert "it would get slots at decode-1: decode-1 had 64 of 64 free." in told
    assert not prefill.submitted
    assert not harness.assembly.dispatcher.requests


async def test_a_key_gets_explanations_of_its_own_requests_only(harness: Any) -> None:
    stub = await harness.serve(KeyGuard(keyring()))
    request = GenerateRequest(
        request_id="mine", token_ids=TokenIds(ids=PROMPT), sampling=SamplingParams(max_tokens=2)
    )
    async for _ in stub.Generate(request, metadata=bearer(ALICE)):
        pass
    about = ExplainRequest(request_id="mine")
    for key in (ALICE, OPERATOR):
        told = await stub.Explain(about, metadata=bearer(key))
        assert told.sentences[0].startswith("Request mine came at ")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.Explain(about, metadata=bearer(BOB))
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    forecast = await stub.Explain(ExplainRequest(forecast=request), metadata=bearer(BOB))
    assert forecast.sentences[0].startswith("The prompt has 15 tokens")


@pytest.mark.parametrize("name", ["r1", "chatcmpl-r1", "resp_r1"])
async def test_the_dashboard_tells_the_same_under_each_id_of_an_answer(
    harness: Any, name: str
) -> None:
    await Call(harness.gateway, asked("r1-0123abcd")).result()
    async with dashboard(harness) as page:
        answer = await page.http.get("/dashboard/explain", params={"id": name})
        assert answer.json() == harness.gateway.explain(name, LOCAL_OPERATOR)
        unknown = await page.http.get("/dashboard/explain", params={"id": "other"})
    assert unknown.status_code == 404
