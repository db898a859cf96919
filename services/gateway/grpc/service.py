"""The gRPC service `Inference`: translates protobuf to the types of the gateway and back."""

from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from typing import Any

from grpc import aio

from quire.progress import ACCEPTED_METADATA
from quire.reports import Model
from quire.types import Candidate, Usage
from quire.v1 import inference_pb2, inference_pb2_grpc, logprobs_pb2
from services.gateway.access.caller import EVERYONE, current_caller
from services.gateway.api import (
    ChatMessage,
    EmbeddingRequest,
    GenerationRequest,
    Generator,
    Prompt,
    RequestedSampling,
    RetainDirective,
    new_resume_token,
)
from services.gateway.chat.prompts import check_num_messages
from services.gateway.checks import require
from services.gateway.output.delta import Delta, PositionLogprobs, PromptReport, Received
from services.protocol.fields import FINISH_REASONS, from_wire, values
from services.protocol.sampling_codec import given_fields
from services.runtime.errors import InvalidRequest

SERVICE_NAME: str = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Serves `generator` over gRPC.

    Methods raise the domain's errors; the server's interceptor maps them to gRPC statuses.
    """

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        with self._recorded(request):
            asked = request_from_wire(request, context.time_remaining())
        await context.send_initial_metadata(((ACCEPTED_METADATA, ""),))
        unsent_token = asked.resume_token
        async with self._generator.generate(asked) as deltas:
            async for delta in deltas:
                yield response_to_wire(delta, unsent_token)
                unsent_token = ""

    async def Embed(
        self, request: inference_pb2.EmbedRequest, context: aio.ServicerContext[Any, Any]
    ) -> inference_pb2.EmbedResponse:
        with self._recorded(request):
            asked = _embedding_from_wire(request, context.time_remaining())
        found = await self._generator.embed(asked)
        return inference_pb2.EmbedResponse(
            request_id=found.request_id, embedding=found.values, usage=_usage(found.usage)
        )

    async def Explain(
        self, request: inference_pb2.ExplainRequest, context: aio.ServicerContext[Any, Any]
    ) -> inference_pb2.ExplainResponse:
        if request.HasField("forecast"):
            asked = request_from_wire(request.forecast, context.time_remaining())
            found = await self._generator.forecast(asked)
        else:
            found = self._generator.explain(request.request_id, current_caller(EVERYONE))
        return inference_pb2.ExplainResponse(sentences=found)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: aio.ServicerContext[Any, Any]
    ) -> inference_pb2.ListModelsResponse:
        served = self._generator.models()
        names = [one.name for one in fields(Model)]
        return inference_pb2.ListModelsResponse(models=[values(model, names) for model in served])

    @contextmanager
    def _recorded(
        self, request: inference_pb2.GenerateRequest | inference_pb2.EmbedRequest
    ) -> Iterator[None]:
        """Records the refusal of a request that cannot be translated."""
        try:
            yield
        except InvalidRequest as error:
            self._generator.record_refusal(
                request.request_id, request.model, error.code, str(error)
            )
            raise


def request_from_wire(
    message: inference_pb2.GenerateRequest, timeout_s: float | None
) -> GenerationRequest:
    received = None
    if message.HasField("received"):
        received = tuple(from_wire(Received, each) for each in message.received.sequences)
    is_new = received is None and not message.resume_token
    return GenerationRequest(
        prompt=_prompt(message),
        request_id=message.request_id,
        model=message.model,
        sampling=RequestedSampling(**given_fields(message.sampling)),
        priority=message.priority,
        cache_salt=message.cache_salt,
        timeout_s=timeout_s,
        received=received,
        include_metrics=message.include_metrics,
        retain=tuple(_directive(each, message) for each in message.retain),
        resume_token=new_resume_token() if is_new else message.resume_token,
    )


def _embedding_from_wire(
    message: inference_pb2.EmbedRequest, timeout_s: float | None
) -> EmbeddingRequest:
    dimensions = message.dimensions if message.HasField("dimensions") else None
    return EmbeddingRequest(
        _prompt(message),
        message.request_id,
        message.model,
        dimensions,
        priority=message.priority,
        cache_salt=message.cache_salt,
        timeout_s=timeout_s,
    )


def _directive(
    asked: inference_pb2.Retain, message: inference_pb2.GenerateRequest
) -> RetainDirective:
    until = None
    if asked.HasField("num_messages"):
        number, chat = asked.num_messages, message.chat.messages
        require(1 <= number <= len(chat), f"num_messages is {number}, not in [1, {len(chat)}]")
        until = _messages(chat[:number])
    return RetainDirective(asked.ttl_s, asked.name, until)


def _prompt(message: Any) -> Prompt:
    """The input of a request for text, or of one for an embedding."""
    match message.WhichOneof("input"):
        case "text":
            return str(message.text)
        case "token_ids":
            return tuple(message.token_ids.ids)
        case "chat":
            check_num_messages(len(message.chat.messages))
            return _messages(message.chat.messages)
    names = ", ".join(one.name for one in message.DESCRIPTOR.oneofs_by_name["input"].fields)
    raise InvalidRequest(f"no input: one of {names} is needed")


def _messages(chat: Iterable[inference_pb2.ChatMessage]) -> tuple[ChatMessage, ...]:
    return tuple(ChatMessage(each.role, each.content, each.name) for each in chat)


def response_to_wire(delta: Delta, resume_token: str) -> inference_pb2.GenerateResponse:
    sequence = inference_pb2.SequenceDelta(
        index=delta.index,
        token_ids=delta.token_ids,
        text=delta.text,
        finish_reason=delta.finish_reason and FINISH_REASONS.numbers[delta.finish_reason],
        logprobs=map(_token_logprobs, delta.logprobs),
        score=delta.score,
    )
    if isinstance(delta.stopped_by, str):
        sequence.stop_string = delta.stopped_by
    elif delta.stopped_by is not None:
        sequence.stop_token_id = delta.stopped_by
    response = inference_pb2.GenerateResponse(
        request_id=delta.request_id, deltas=(sequence,), resume_token=resume_token
    )
    if delta.prompt is not None:
        response.prompt_logprobs.extend(_prompt_logprobs(delta.prompt))
    if delta.usage is not None:
        response.usage.CopyFrom(_usage(delta.usage))
    return response


def _prompt_logprobs(prompt: PromptReport) -> Iterator[logprobs_pb2.TokenLogprobs]:
    for entries in prompt.entries():
        chosen, *top = (
            logprobs_pb2.Candidate(token_id=i, logprob=logprob, rank=rank, token=prompt.tokens[i])
            for i, logprob, rank in entries
        )
        yield logprobs_pb2.TokenLogprobs(chosen=chosen, top=top)


def _usage(usage: Usage) -> inference_pb2.Usage:
    return inference_pb2.Usage(**asdict(usage))


def _token_logprobs(logprobs: PositionLogprobs) -> logprobs_pb2.TokenLogprobs:
    return logprobs_pb2.TokenLogprobs(
        chosen=_candidate(logprobs.chosen), top=map(_candidate, logprobs.top)
    )


def _candidate(one: Candidate) -> logprobs_pb2.Candidate:
    """As `to_fields` does, in a quarter of the time: there may be twenty for each token."""
    return logprobs_pb2.Candidate(
        token_id=one.token_id, logprob=one.logprob, rank=one.rank, token=one.token
    )
