"""What clients may send, and what they are told; through the gateway's own gRPC server."""

import asyncio
import secrets
import time
from typing import Any

import grpc
import pytest
from grpc import aio

from blockstore.registry import Member
from quire.v1 import (
    block_manager_pb2,
    block_manager_pb2_grpc,
    inference_pb2,
    prefill_pb2,
    sampling_pb2,
)
from quire.v1.supervisor_pb2 import ScaleRequest
from quire.v1.supervisor_pb2_grpc import SupervisorStub
from services.common.errors import (
    DuplicateRequest,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    UnknownModel,
    UnknownWorker,
)
from services.common.rpc.transport import RpcServer, from_rpc_error, open_channel
from services.common.structured.structure import Structure, StructureKind
from services.gateway.frontend.api import (
    ChatMessage,
    GenerationRequest,
    RequestedBeams,
    RequestedSampling,
)
from services.gateway.frontend.relay import BLOCK_MANAGER, SUPERVISOR, Relay, Target
from services.gateway.frontend.service import SERVICE_NAME
from services.gateway.intake import admission
from services.gateway.intake.prompts import MAX_MESSAGES
from services.gateway.streaming import output
from services.protocol.version import PROTOCOL_VERSION
from tests.secret import SECRET, guard

from .conftest import PROMPT, SPEC, Call, asked, until
from .fakes import FakeDecode, FakePrefill, Verbatim, expected

POOL_TOKENS = SPEC.num_blocks * SPEC.block_size
NAN, INFINITY = float("nan"), float("inf")
FORM = Structure(StructureKind.REGEX, "a+")


@pytest.fixture
async def harness(make_harness: Any) -> Any:
    return await make_harness(FakePrefill(), FakeDecode())


async def refused(harness: Any, request: GenerationRequest) -> Exception:
    """What the request is refused with; a good one is served right after it."""
    with pytest.raises(InvalidRequest) as error:
        await Call(harness.gateway, request).result()
    good = Call(harness.gateway, asked("good"))
    await good.result()
    assert good.tokens == expected(PROMPT, 8)
    return error.value


@pytest.mark.parametrize(
    ("sampling", "text"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": NAN}, "temperature is nan"),
        ({"temperature": INFINITY}, "temperature is inf"),
        ({"temperature": 1e300}, "too large"),
        ({"top_k": -2}, "top_k is -2"),
        ({"top_p": 0.0}, "top_p is 0"),
        ({"top_p": 1e-60}, "top_p is 0"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_p": NAN}, "top_p is nan"),
        ({"min_p": -0.01}, "min_p is -0.01"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 1 << 64}, "seed is 18446744073709551616"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": -5}, "max_tokens is -5"),
        (
            {"max_tokens": 4096 - len(PROMPT) + 1},
            "maximum context length is 4096 tokens. However, you requested 4097",
        ),
        ({"stop": ("",)}, "a stop string is empty"),
        ({"stop": ("x",) * 65}, "65 stop strings"),
        ({"stop": ("x" * 1025,)}, "1025 characters"),
        ({"stop": ("\ud800",)}, "not valid Unicode"),
        ({"stop_token_ids": (300,)}, "300 is not in the vocabulary of 300"),
        ({"stop_token_ids": (-1,)}, "-1 is not in the vocabulary"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0, not above 0"),
        ({"repetition_penalty": -1.0}, "repetition_penalty is -1"),
        ({"repetition_penalty": INFINITY}, "repetition_penalty is inf"),
        ({"presence_penalty": 2.1}, "presence_penalty is 2.1, not in [-2, 2]"),
        ({"frequency_penalty": -2.1}, "frequency_penalty is -2.1, not in [-2, 2]"),
        ({"frequency_penalty": NAN}, "frequency_penalty is nan"),
        ({"logit_bias": ((7, 100.5),)}, "logit_bias of 7 is 100.5, not in [-100, 100]"),
        ({"logit_bias": ((7, NAN),)}, "logit_bias of 7 is nan"),
        ({"logit_bias": ((300, 1.0),)}, "logit_bias: 300 is not in the vocabulary of 300"),
        ({"logit_bias": ((7, 1.0), (7, 2.0))}, "in logit_bias twice"),
        ({"logit_bias": ((7, 1.0),) * 1025}, "1025 tokens in logit_bias, at most 1024"),
        ({"allowed_token_ids": ()}, "allowed_token_ids is empty"),
        ({"allowed_token_ids": (300,)}, "allowed_token_ids: 300 is not in the vocabulary"),
        ({"allowed_token_ids": (1,) * 16_385}, "16385 allowed_token_ids, at most 16384"),
        ({"bad_words": ("x",) * 1001}, "1001 bad_words, at most 1000"),
        ({"bad_words": ("x" * 16_385,)}, "16385 characters in bad_words, at most 16384"),
        ({"bad_words": (" ",)}, "a bad word is empty"),
        ({"bad_words": ("\ud800",)}, "not valid Unicode"),
        ({"min_tokens": -1}, "min_tokens is -1, not 0 or more"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens is 3, max_tokens only 2"),
        (
            {"allowed_token_ids": (7, 8), "min_tokens": 1, "stop_token_ids": (7, 8)},
            "min_tokens is 1, but all 2 allowed_token_ids are bad_words or end the generation",
        ),
        ({"structure": FORM, "allowed_token_ids": (7,)}, "combined with allowed_token_ids"),
        ({"structure": FORM, "ignore_eos": True}, "combined with ignore_eos"),
        ({"structure": FORM, "beam": RequestedBeams(2)}, "combined with use_beam_search"),
        ({"structure": Structure(FORM.kind, "é" * 131_073)}, "has 262146 bytes, at most 262144"),
        ({"structure": Structure(FORM.kind, "(")}, "regex cannot be compiled"),
    ],
)
async def test_bad_sampling_parameters(harness: Any, sampling: Any, text: str) -> None:
    request = GenerationRequest(prompt=PROMPT, sampling=RequestedSampling(**sampling))
    assert text in str(await refused(harness, request))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": ()}, "the prompt is empty"),
        ({"prompt": (1, 300)}, "300 is not in the vocabulary"),
        ({"prompt": (1, -1)}, "-1 is not in the vocabulary"),
        ({"prompt": "a \ud800 b"}, "not valid Unicode"),
        ({"prompt": (ChatMessage("", "hi"),)}, "message 0 has no role"),
        ({"priority": 128}, "priority is 128"),
        ({"priority": -129}, "priority is -129"),
        ({"request_id": "x" * 257}, "request_id has 257"),
        ({"cache_salt": "\udfff"}, "cache_salt is not valid Unicode"),
    ],
)
async def test_bad_requests(harness: Any, fields: Any, text: str) -> None:
    assert text in str(await refused(harness, asked(**({"request_id": "bad"} | fields))))


@pytest.mark.parametrize("priority", [-1, 1, 1000])
async def test_a_priority_is_refused_unless_the_deployment_allows_it(
    make_harness: Any, priority: int
) -> None:
    """As vLLM refuses it without its priority scheduler; the error names the flag."""
    harness = await make_harness(FakePrefill(), FakeDecode(), client_priority=False)
    error = await refused(harness, asked(priority=priority))
    assert isinstance(error, InvalidRequest)
    assert f"priority is {priority}" in str(error)
    assert "--client-priority" in str(error)
    await Call(harness.gateway, asked(priority=0)).result()


async def test_a_prompt_that_fills_the_context(harness: Any) -> None:
    prompt = tuple([65] * 4096)
    error = await refused(harness, asked("r", prompt=prompt))
    assert isinstance(error, PromptTooLong)
    assert "4096 tokens" in str(error)
    last = Call(harness.gateway, asked("r", prompt=prompt[:-1], max_tokens=1))
    await last.result()
    assert last.tokens == expected(prompt[:-1], 1)


async def test_a_prompt_of_ten_megabytes_is_refused_and_the_loop_goes_on(harness: Any) -> None:
    longest_s, seen_at = 0.0, time.perf_counter()
    call = Call(harness.gateway, asked("r", prompt="prefill and decode " * ((10 << 20) // 19)))
    while not call.task.done():
        await asyncio.sleep(0)
        now = time.perf_counter()
        longest_s, seen_at = max(longest_s, now - seen_at), now
    with pytest.raises(PromptTooLong, match="more than 4096 tokens"):
        await call.result()
    assert longest_s < 1.0


async def test_a_chat_that_fits_no_context_is_refused_before_it_is_rendered(harness: Any) -> None:
    """No token of this model stands for more than one character."""
    harness.assembly.directory.served("toy").model.chat_template.__dict__["_template"] = None
    prompt = (ChatMessage("user", "<" * 3000), ChatMessage("user", "<" * 3000))
    with pytest.raises(PromptTooLong, match="more than 4096 tokens"):
        await Call(harness.gateway, asked("r", prompt=prompt)).result()


async def test_a_request_larger_than_the_pool_is_refused_with_the_numbers(
    make_harness: Any,
) -> None:
    harness = await make_harness(FakePrefill(max_model_len=8192), FakeDecode(max_model_len=8192))
    error = await refused(harness, asked("r", max_tokens=POOL_TOKENS - len(PROMPT) + 1))
    assert isinstance(error, PromptTooLong)
    assert "need 257 blocks of 16 tokens; the pool has 256" in str(error)


@pytest.mark.parametrize(("max_model_len", "room"), [(100, 100), (8192, POOL_TOKENS)])
async def test_an_absent_max_tokens_is_what_context_and_pool_leave(
    make_harness: Any, max_model_len: int, room: int
) -> None:
    prefill = FakePrefill(max_model_len=max_model_len)
    harness = await make_harness(prefill, FakeDecode(max_model_len=max_model_len))
    prefill.holds = True
    call = Call(harness.gateway, asked(max_tokens=None))
    await until(lambda: bool(prefill.held))
    assert prefill.held[0][1].sampling.max_tokens == room - len(PROMPT)
    await call.cancel()


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(10, 16), (4090, 6)])
async def test_an_absent_max_tokens_may_have_a_usual_number(
    make_harness: Any, num_prompt: int, max_tokens: int
) -> None:
    """Less, where the context leaves less."""
    prefill = FakePrefill()
    harness = await make_harness(prefill, FakeDecode())
    prefill.holds = True
    prompt, sampling = (65,) * num_prompt, {"default_max_tokens": 16}
    call = Call(harness.gateway, asked(max_tokens=None, prompt=prompt, sampling=sampling))
    await until(lambda: bool(prefill.held))
    assert prefill.held[0][1].sampling.max_tokens == max_tokens
    await call.cancel()


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


async def test_a_template_gets_what_its_client_tells_it(harness: Any) -> None:
    """Names, and variables that are not the template's own."""
    told = ChatMessage("user", "hi", "Ann")
    call = Call(harness.gateway, asked("a", prompt=(told,), template_arguments={"mark": "!"}))
    last = await call.result()
    assert last.usage is not None
    assert last.usage.num_prompt_tokens == len("Ann@user:hi!;")
    for name in ("messages", "add_generation_prompt", "range", "raise_exception", "tokenize"):
        request = asked("b", prompt=(told,), template_arguments={name: 1})
        assert f"'{name}' is not for clients to set" in str(await refused(harness, request))


async def test_an_absent_seed_is_drawn_and_a_given_one_kept(harness: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(secrets, "randbits", lambda bits: bits)
    prefill = FakePrefill("prefill-2")
    await harness.add(prefill)
    await harness.registry.withdraw("prefill-1")
    await until(lambda: harness.connected() == {"prefill-2", "decode-1"})
    await Call(harness.gateway, asked("drawn")).result()
    await Call(harness.gateway, asked("given", sampling={"seed": (1 << 64) - 1})).result()
    seeds = [s.ticket.sampling.seed for s in prefill.commands(prefill_pb2.PrefillSubmit)]
    assert seeds == [64, (1 << 64) - 1]


async def test_a_request_that_fits_no_pool_any_more_fails_and_delays_no_other(
    harness: Any, monkeypatch: Any
) -> None:
    """It was admitted for a pool that is gone since."""
    with monkeypatch.context() as before:
        before.setattr(admission, "resolve_max_tokens", lambda *_, default: POOL_TOKENS)
        with pytest.raises(PromptTooLong, match="the pool has"):
            await Call(harness.gateway, asked()).result()
    await Call(harness.gateway, asked("next")).result()


async def test_only_equal_salts_share_prefixes(make_harness: Any) -> None:
    prefill = FakePrefill()
    harness = await make_harness(prefill, FakeDecode())
    for number, salt in enumerate(("", "a", "b", "a")):
        await Call(harness.gateway, asked(f"r{number}", cache_salt=salt)).result()
    submits = prefill.commands(prefill_pb2.PrefillSubmit)
    none, a, b, a_again = (submit.ticket.root_hash for submit in submits)
    assert a == a_again
    assert len({none, a, b}) == 3


async def test_a_request_id_may_run_once_at_a_time(make_harness: Any) -> None:
    """Then again, under another attempt: a worker may not have let go of the first one yet."""
    prefill, decode = FakePrefill(), FakeDecode()
    harness = await make_harness(prefill, decode)
    decode.pause_after = 2
    first = Call(harness.gateway, asked("same"))
    await until(lambda: "same" in decode.running)
    with pytest.raises(DuplicateRequest, match="this request_id and resume_token"):
        await Call(harness.gateway, asked("same")).result()
    decode.go_on(pause_after=8)
    await first.result()
    await Call(harness.gateway, asked("same")).result()
    submits = prefill.commands(prefill_pb2.PrefillSubmit)
    assert [submit.ticket.attempt for submit in submits] == [1, 2]


@pytest.mark.parametrize("others_token", ["", "of another client, 128 bits"])
async def test_a_request_id_of_another_client_is_no_obstacle(
    make_harness: Any, others_token: str
) -> None:
    """Nobody can keep an id from others, or find out that it is in use."""
    prefill, decode = FakePrefill(), FakeDecode()
    prefill.names, decode.names = Verbatim(), Verbatim()
    harness = await make_harness(prefill, decode)
    decode.pause_after = 2
    squatter = Call(harness.gateway, asked("same", resume_token=others_token))
    await until(lambda: len(decode.running) == 1)
    mine = Call(harness.gateway, asked("same"))
    await until(lambda: len(decode.running) == 2)
    decode.go_on(pause_after=8)
    for call in (squatter, mine):
        assert (await call.result()).request_id == "same"
        assert call.tokens == expected(PROMPT, 8)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"resume_token": "x" * 21}, "resume_token has 21 characters; it needs 128 random bits"),
        ({"resume_token": "x" * 257}, "resume_token has 257 characters, at most 256"),
        ({"resume_token": "", "received": ()}, "received needs the request_id and the resume_tok"),
        ({"request_id": "", "received": ()}, "received needs the request_id and the resume_token"),
    ],
)
async def test_a_bad_resume_token_is_refused(harness: Any, fields: Any, text: str) -> None:
    assert text in str(await refused(harness, asked(**({"request_id": "bad"} | fields))))


async def test_an_unknown_model_is_named_with_those_that_are_there(harness: Any) -> None:
    with pytest.raises(UnknownModel, match="'other' is not served here; these are: toy"):
        await Call(harness.gateway, asked(model="other")).result()
    await Call(harness.gateway, asked(model="toy")).result()


async def test_a_client_that_does_not_read_is_cancelled(
    make_harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "MAX_UNREAD_TOKENS", 100)
    decode = FakeDecode()
    harness = await make_harness(FakePrefill(), decode)
    deltas = harness.gateway.generate(asked(max_tokens=1000))
    await anext(deltas)
    await until(lambda: decode.aborted == [("r1", 1)])
    with pytest.raises(Overloaded, match="too slowly"):
        await anext(deltas)
    assert not decode.running


# ── through gRPC ─────────────────────────────────────────────────────────────────────────────────


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


@pytest.mark.parametrize(
    ("request_", "status", "code"),
    [
        (inference_pb2.GenerateRequest(), grpc.StatusCode.INVALID_ARGUMENT, "invalid_request"),
        (
            inference_pb2.GenerateRequest(text="x", model="nope"),
            grpc.StatusCode.NOT_FOUND,
            "model_not_found",
        ),
        (
            inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[1] * 5000)),
            grpc.StatusCode.INVALID_ARGUMENT,
            "context_length_exceeded",
        ),
    ],
)
async def test_errors_have_their_status_and_code(
    harness: Any, request_: Any, status: Any, code: str
) -> None:
    stub = await harness.serve()
    with pytest.raises(aio.AioRpcError) as error:
        await stub.Generate(request_).read()
    assert error.value.code() is status
    assert dict(error.value.trailing_metadata() or ())["quire-error-code"] == code


async def test_a_client_that_hangs_up_frees_what_it_had(make_harness: Any) -> None:
    prefill, decode = FakePrefill(), FakeDecode()
    harness = await make_harness(prefill, decode)
    stub = await harness.serve()
    decode.pause_after = 3
    call = stub.Generate(
        inference_pb2.GenerateRequest(
            request_id="r1",
            token_ids=inference_pb2.TokenIds(ids=PROMPT),
            sampling=sampling_pb2.SamplingParams(max_tokens=100),
        )
    )
    await call.read()
    call.cancel()
    await until(lambda: decode.aborted == [("r1", 1)])
    assert harness.assembly.dispatcher.num_running == 0


async def test_the_rpc_deadline_is_the_requests(make_harness: Any) -> None:
    prefill, decode = FakePrefill(), FakeDecode()
    harness = await make_harness(prefill, decode)
    stub = await harness.serve()
    prefill.holds = True
    request = inference_pb2.GenerateRequest(request_id="r1", text="hello")
    with pytest.raises(aio.AioRpcError) as error:
        await stub.Generate(request, timeout=0.3).read()
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert 0 < prefill.held[0][1].timeout_ms <= 300
    await until(lambda: prefill.aborted == [("r1", 1)] and decode.aborted == [("r1", 1)])


async def test_models_are_listed_while_they_can_be_served(harness: Any) -> None:
    stub = await harness.serve()
    (model,) = (await stub.ListModels(inference_pb2.ListModelsRequest())).models
    assert (model.id, model.max_model_len, model.block_size) == ("toy", 4096, 16)
    assert model.dtype == "float32"
    await harness.registry.withdraw("decode-1")
    await until(lambda: not harness.gateway.ready())
    assert not (await stub.ListModels(inference_pb2.ListModelsRequest())).models


class OneOperation(block_manager_pb2_grpc.BlockManagerServicer):
    """A block manager that knows one operation and one worker."""

    seconds_left: float

    async def DrainWorker(self, request: Any, context: Any) -> Any:
        self.seconds_left = context.time_remaining()
        if request.worker_id != "decode-1":
            raise UnknownWorker(f"no worker {request.worker_id}")
        return block_manager_pb2.DrainWorkerResponse(num_running=3)


def target_of(member: Member | None) -> Target | None:
    return Target(member.address, member.member_id) if member else None


async def test_without_a_supervisor_scaling_says_who_else_may_do_it(harness: Any) -> None:
    relay, front = Relay(SUPERVISOR, lambda: None), RpcServer(SUPERVISOR.name)
    front.aio.add_generic_rpc_handlers((relay.handlers(),))
    channel = open_channel(f"127.0.0.1:{await front.start('127.0.0.1', 0)}")
    for close in (relay.close, front.stop, channel.close):
        harness.stack.push_async_callback(close)
    with pytest.raises(aio.AioRpcError) as error:
        await SupervisorStub(channel).Scale(ScaleRequest(num_decode=2))
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "docker compose up --scale" in (error.value.details() or "")


async def test_operations_are_relayed_to_the_block_manager(harness: Any) -> None:
    relay, front = (
        Relay(
            BLOCK_MANAGER,
            lambda: target_of(harness.assembly.directory.block_manager),
            SECRET.rpc_key,
        ),
        RpcServer(BLOCK_MANAGER.name),
    )
    front.aio.add_generic_rpc_handlers((relay.handlers(),))
    channel = open_channel(f"127.0.0.1:{await front.start('127.0.0.1', 0)}")
    for close in (relay.close, front.stop, channel.close):
        harness.stack.push_async_callback(close)
    stub = block_manager_pb2_grpc.BlockManagerStub(channel)
    request = block_manager_pb2.DrainWorkerRequest(worker_id="decode-1")
    with pytest.raises(aio.AioRpcError) as error:
        await stub.DrainWorker(request)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE

    manager, server = OneOperation(), RpcServer(guard=guard("bm"))  # type: ignore[abstract]
    block_manager_pb2_grpc.add_BlockManagerServicer_to_server(manager, server.aio)
    port = await server.start("127.0.0.1", 0)
    harness.stack.push_async_callback(server.stop)
    address = f"127.0.0.1:{port}"
    entry = Member("bm", "block_manager", address, "serving", 1, PROTOCOL_VERSION)
    await harness.registry.announce(entry, ttl_s=1e6)
    await until(lambda: harness.assembly.directory.block_manager is not None)
    assert (await stub.DrainWorker(request, timeout=5)).num_running == 3
    assert 0 < manager.seconds_left < 6
    with pytest.raises(aio.AioRpcError) as error:
        await stub.DrainWorker(block_manager_pb2.DrainWorkerRequest(worker_id="x"))
    assert error.value.code() is grpc.StatusCode.NOT_FOUND
    assert isinstance(from_rpc_error(error.value), UnknownWorker)
    with pytest.raises(aio.AioRpcError) as error:
        await stub.ListPools(block_manager_pb2.ListPoolsRequest())
    assert error.value.code() is grpc.StatusCode.INTERNAL
    assert dict(error.value.trailing_metadata() or ())["quire-error-code"] == "internal"
