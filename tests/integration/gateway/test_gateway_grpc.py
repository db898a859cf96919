"""Requests through the gateway's own gRPC server."""

from typing import Any

import grpc
import pytest
from grpc import aio

from quire.v1 import inference_pb2, sampling_pb2
from services.gateway.chat.prompts import MAX_MESSAGES
from services.gateway.grpc.service import SERVICE_NAME
from services.runtime.rpc.transport import open_channel
from tests.waiting import until

from .fakes import expected


async def test_text_and_chat_are_tokenized_as_the_model_has_it(harness: Any) -> None:
    stub = await harness.serve()
    sampling = sampling_pb2.SamplingParams(max_tokens=3)
    text = inference_pb2.GenerateRequest(text="hello", sampling=sampling)
    chat = inference_pb2.GenerateRequest(
        chat=inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="hi")]),
        sampling=sampling,
    )
    for request, prompt in ((text, b"hello"), (chat, b"user:hi;")):
        responses = [response async for response in stub.Generate(request)]
        tokens = [t for r in responses for d in r.deltas for t in d.token_ids]
        assert tokens == expected(prompt, 3)
        assert "".join(d.text for r in responses for d in r.deltas) == bytes(tokens).decode()
        assert responses[-1].usage.num_prompt_tokens == len(prompt)
        assert responses[-1].deltas[0].finish_reason == sampling_pb2.FINISH_REASON_LENGTH
        assert not any(response.HasField("usage") for response in responses[:-1])


async def test_models_are_listed_while_they_can_be_served(harness: Any) -> None:
    stub = await harness.serve()
    (model,) = (await stub.ListModels(inference_pb2.ListModelsRequest())).models
    assert (model.id, model.max_model_len, model.block_size) == ("toy", 4096, 16)
    assert model.dtype == "float32"
    await harness.registry.withdraw("decode-1")
    await until(lambda: not harness.gateway.ready())
    assert not (await stub.ListModels(inference_pb2.ListModelsRequest())).models


async def test_too_many_messages_are_refused_before_they_are_looked_at(harness: Any) -> None:
    stub = await harness.serve()
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage()] * (MAX_MESSAGES + 1))
    with pytest.raises(aio.AioRpcError, match=f"at most {MAX_MESSAGES}"):
        await stub.Generate(inference_pb2.GenerateRequest(chat=chat)).read()
    hostile = b"\x2a\x80\x80\x80\x06" + b"\x0a\x00" * (6 << 20)
    channel = open_channel(await harness.listen())
    harness.stack.push_async_callback(channel.close)
    call: Any = channel.unary_stream(f"/{SERVICE_NAME}/Generate")
    with pytest.raises(aio.AioRpcError, match="more than 65536 fields") as error:
        await call(hostile).read()
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
