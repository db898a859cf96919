"""Bad input of clients: each case gets a clear error with the right status, and the service goes
on."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import InferenceStub
from quire.v1.sampling_pb2 import SamplingParams

from .conftest import POOL_BLOCKS
from .deployment import Deployment, remove, start

Status = grpc.StatusCode


@pytest.fixture
def inference(deployment: Deployment) -> Iterator[Any]:
    options = [("grpc.max_send_message_length", 32 << 20)]
    with grpc.insecure_channel(deployment.address, options=options) as channel:
        yield InferenceStub(channel)


def request(**fields: Any) -> pb.GenerateRequest:
    sampling = fields.pop("sampling", {"max_tokens": 4, "ignore_eos": True})
    if not fields.keys() & {"text", "token_ids", "chat"}:
        fields["text"] = "hello"
    return pb.GenerateRequest(sampling=SamplingParams(**sampling), **fields)


# One refusal of each part that a request passes; `tests/integration` has all others.
BAD = {
    "gRPC": (
        request(chat=pb.Chat(messages=[pb.ChatMessage(content="hi")])),
        Status.INVALID_ARGUMENT,
        "role",
    ),
    "models": (request(model="nobody"), Status.NOT_FOUND, "nobody"),
    "tokenizer": (request(text="x" * (10 << 20)), Status.INVALID_ARGUMENT, "4096"),
    "pool": (
        request(token_ids=pb.TokenIds(ids=[1] * 1100), sampling={"max_tokens": 1000}),
        Status.INVALID_ARGUMENT,
        str(POOL_BLOCKS),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_grpc_says_what_is_wrong(inference: Any, name: str) -> None:
    bad, status, text = BAD[name]
    with pytest.raises(grpc.RpcError) as caught:
        list(inference.Generate(bad, timeout=20))
    assert caught.value.code() is status, caught.value
    assert text in (caught.value.details() or "")
    # And the next one is served.
    last = list(inference.Generate(request(), timeout=20))[-1]
    assert last.usage.num_generated_tokens == 4


def test_a_message_beyond_the_limit_is_refused(inference: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(inference.Generate(request(text="x" * (20 << 20)), timeout=20))
    assert caught.value.code() is Status.RESOURCE_EXHAUSTED


def test_a_deadline_is_kept(inference: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(
            inference.Generate(
                request(sampling={"max_tokens": 900, "ignore_eos": True}), timeout=0.05
            )
        )
    assert caught.value.code() is Status.DEADLINE_EXCEEDED


HTTP_BAD: dict[str, tuple[str, Any, int, str]] = {
    "not JSON": ("/v1/completions", b"{", 400, ""),
    "unknown model": ("/v1/completions", {"model": "nobody", "prompt": "a"}, 404, "nobody"),
    "best_of": (
        "/v1/completions",
        {"prompt": "a", "n": 2, "best_of": 3},
        400,
        "best_of is 3, n is 2",
    ),
    "logit_bias": (
        "/v1/completions",
        {"prompt": "a", "logit_bias": {"384": 1}},
        400,
        "logit_bias: 384 is not in the vocabulary of 384",
    ),
}


@pytest.mark.parametrize("name", HTTP_BAD)
def test_http_says_what_is_wrong(deployment: Deployment, name: str) -> None:
    path, body, status, text = HTTP_BAD[name]
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    with httpx.Client(base_url=deployment.http, trust_env=False) as http:
        response = http.post(path, content=content, headers={"Content-Type": "application/json"})
        assert response.status_code == status, response.text
        assert text in response.json()["error"]["message"]
        good = {"model": "tiny", "prompt": "hello", "max_tokens": 3}
        assert http.post("/v1/completions", json=good).status_code == 200


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--pool-memory", "100TiB"], "TiB"),
        (["--lora", "poet=/nowhere"], "--lora poet=/nowhere: adapter /nowhere: "),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_failed_start_says_why(
    checkpoint: Path, tmp_path: Path, args: list[str], text: str
) -> None:
    started = start(checkpoint, tmp_path, *args)
    try:
        assert started.process.wait(60) != 0
        last = started.log.read_text().strip().splitlines()[-1]
        assert text in last, started.log.read_text()[-3000:]
        assert "Traceback" not in last
    finally:
        remove(started.run_root)
