"""The request that the gateway makes of a client's gRPC message."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from quire.progress import ACCEPTED_METADATA
from quire.v1 import inference_pb2, sampling_pb2
from services.gateway.api import ChatMessage, GenerationRequest, RequestedSampling, ServedModel
from services.gateway.grpc.service import InferenceService
from services.gateway.output.delta import Delta, Received
from services.protocol.ticket import FinishReason
from tests.grpc_context import FakeContext


async def _nothing() -> AsyncGenerator[Delta, None]:
    return
    yield


class Recorder:
    """A generator without any output."""

    def __init__(self) -> None:
        self.asked: list[GenerationRequest] = []
        self.refusals: list[tuple[str, str, str]] = []

    @asynccontextmanager
    async def generate(self, request: GenerationRequest) -> AsyncIterator[AsyncIterator[Delta]]:
        self.asked.append(request)
        yield _nothing()

    def record_refusal(self, request_id: str, model: str, code: str, reason: str) -> None:
        self.refusals.append((request_id, model, code))

    def models(self) -> tuple[ServedModel, ...]:
        return ()

    def ready(self) -> bool:
        return True


async def asked_for(message: inference_pb2.GenerateRequest, timeout_s: float | None) -> Any:
    recorder, context = Recorder(), FakeContext(timeout_s)
    async for _ in InferenceService(recorder).Generate(message, context):  # type: ignore[arg-type]
        raise AssertionError("nothing was generated")
    assert context.initial_metadata == [(ACCEPTED_METADATA, "")]
    (request,) = recorder.asked
    assert message.resume_token or len(request.resume_token) == 43  # drawn: 256 bits
    return request if message.resume_token else replace(request, resume_token="")


async def test_every_field_arrives() -> None:
    sampling = sampling_pb2.SamplingParams(
        temperature=0.5,
        top_k=3,
        top_p=0.75,
        min_p=0.25,
        seed=2**63,
        max_tokens=9,
        stop=["a", "b"],
        stop_token_ids=[4, 5],
        ignore_eos=True,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={9: 1.0, 8: -2.5},
        allowed_token_ids=[9, 8],
        bad_words=["x"],
        min_tokens=2,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        n=3,
    )
    message = inference_pb2.GenerateRequest(
        request_id="r",
        resume_token="t" * 22,
        model="m",
        token_ids=inference_pb2.TokenIds(ids=[1, 2]),
        sampling=sampling,
        priority=-3,
        cache_salt="tenant",
    )
    message.received.sequences.add(index=2, token_ids=[8, 9])
    message.received.sequences.add(index=0, finish_reason="FINISH_REASON_LENGTH")
    wanted = RequestedSampling(
        0.5,
        3,
        0.75,
        0.25,
        2**63,
        9,
        ("a", "b"),
        (4, 5),
        True,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={8: -2.5, 9: 1.0},
        allowed_token_ids=(9, 8),
        bad_words=("x",),
        min_tokens=2,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        n=3,
    )
    received = Received(2, (8, 9)), Received(0, (), FinishReason.LENGTH)
    assert await asked_for(message, 1.5) == GenerationRequest(
        (1, 2),
        "r",
        "m",
        wanted,
        priority=-3,
        cache_salt="tenant",
        timeout_s=1.5,
        received=received,
        resume_token="t" * 22,
    )


async def test_omitted_parameters_are_left_to_the_model() -> None:
    """A zero is not omitted: a temperature of 0 is greedy, not the default."""
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="hi")])
    silent = inference_pb2.GenerateRequest(chat=chat)
    assert await asked_for(silent, None) == GenerationRequest((ChatMessage("user", "hi"),))

    greedy = inference_pb2.GenerateRequest(
        text="hi", sampling=sampling_pb2.SamplingParams(temperature=0.0)
    )
    assert await asked_for(greedy, None) == GenerationRequest(
        "hi", sampling=RequestedSampling(temperature=0.0)
    )
