"""Bad input of clients: each case gets a clear error with the right status, and the service goes
on."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import grpc
import jsonschema
import pytest

from quire import InvalidRequest, StructuredOutput
from quire.async_client import AsyncClient
from quire.types import Sampling
from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import InferenceStub
from quire.v1.sampling_pb2 import SamplingParams
from tests.waiting import until

from .conftest import POOL_BLOCKS
from .deployment import Deployment

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


LIMIT_S = 90.0
PROMPT = [300, 280, 310, 299]
DIGITS = {"type": "integer", "minimum": 100_000, "maximum": 999_999}
PROPERTIES = {
    "name": {"type": "string", "maxLength": 12},
    "numbers": {"type": "array", "items": DIGITS, "minItems": 60, "maxItems": 70},
}
NUMBERS = {"type": "object", "properties": PROPERTIES, "required": ["name", "numbers"]} | {
    "additionalProperties": False
}
HOSTILE = {
    "a prime number": StructuredOutput(json={"type": "integer", "multipleOf": 999_983}),
    "rules of rules": StructuredOutput(
        grammar="start: a0\na3000: /x/\n"
        + "".join(f"a{i}: a{i + 1} a{i + 1} a{i + 1}\n" for i in range(3000))
    ),
}


class Stream:
    """A request whose answer is an object of some 700 tokens."""

    def __init__(self, client: AsyncClient) -> None:
        self.num_tokens, self.text = 0, ""
        self.reading = asyncio.create_task(self._read(client))

    async def _read(self, client: AsyncClient) -> None:
        form = StructuredOutput(json=NUMBERS)
        sampling = Sampling(temperature=1.0, seed=7, max_tokens=1500, structured_outputs=form)
        async for delta in client.generate(PROMPT, sampling, timeout_s=LIMIT_S):
            self.num_tokens += len(delta.token_ids)
            self.text += delta.text
        jsonschema.validate(json.loads(self.text), NUMBERS)

    async def is_in_mid_object(self) -> None:
        await until(lambda: self.reading.done() or self.num_tokens >= 100)
        assert not self.reading.done()


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_form_is_refused_and_disturbs_nobody(
    client: AsyncClient, two_decoders: None, name: str
) -> None:
    async with asyncio.timeout(LIMIT_S):
        stream = Stream(client)
        await stream.is_in_mid_object()
        asked = Sampling(structured_outputs=HOSTILE[name], max_tokens=5)
        with pytest.raises(InvalidRequest, match="is too large, too deep or too complex"):
            await client.complete(PROMPT, asked, timeout_s=LIMIT_S)
        await stream.reading
        good = Sampling(structured_outputs=StructuredOutput(regex=f"after {name}"), max_tokens=50)
        assert (await client.complete(PROMPT, good, timeout_s=LIMIT_S)).text == f"after {name}"
