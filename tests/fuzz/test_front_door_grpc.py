"""Arbitrary client input over gRPC: each request gets tokens of its own prompt or a clear status,
nothing hangs or is left behind, and the request of another client is not disturbed."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from grpc import aio
from hypothesis import given
from hypothesis import strategies as st

from quire.v1 import block_manager_pb2, inference_pb2, supervisor_pb2
from services.gateway.grpc.service import SERVICE_NAME
from services.runtime.rpc.interceptor import CODE_TRAILER
from tests.fuzz.deployment import VOCAB, Deployment, expected
from tests.fuzz.victim import FUZZ, VICTIM, victim

pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")
CLEAR = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}
IDS = st.sampled_from([0, 1, 97, 122, VOCAB - 1, VOCAB, 2**31, 2**32 - 1])
GOOD_IDS = st.lists(st.integers(0, VOCAB - 1), max_size=20)
MANY_IDS = GOOD_IDS | GOOD_IDS | st.lists(IDS, max_size=70) | st.just([1] * 100_000)
TEXTS = st.sampled_from(["", "a", "hello", "ü\x00", "x" * 300, "\U0001f600" * 2000, "a" * 300_000])
NAMES = st.sampled_from(["", "toy", "nobody", "x" * 100_000, "\x00", "ü" * 5000, "victim", "r1"])
REQUEST_IDS = st.sampled_from(["r1", "r1", "r2", "victim", "", "x" * 257, "\x00", "r" * 100_000])
FLOATS = st.sampled_from([0.0, 0.0, 0.5, 1.0, -0.0, 1e-45, 3e38, -1.0, float("nan"), float("inf")])
NUMBERS = st.sampled_from([0, 1, 2, 3, -1, -2, 2**31 - 1, 2**32 - 1, -(2**31), 2**64 - 1])
RECEIVED = st.lists(
    st.tuples(
        st.sampled_from([0, 0, 1, 2, 63, 64, 2**32 - 1]),
        GOOD_IDS | MANY_IDS,
        st.sampled_from([0, 0, 1, 2, 99]),
    ),
    max_size=3,
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "request_id": REQUEST_IDS,
    "resume_token": st.sampled_from(["", "t" * 22, "t" * 22, "short", "ü" * 22, "x" * 257]),
    "model": NAMES,
    "priority": st.sampled_from([0, 0, -128, 127, 128, -(2**31), 2**31 - 1]),
    "cache_salt": NAMES,
    "sampling.temperature": FLOATS,
    "sampling.top_k": NUMBERS,
    "sampling.top_p": FLOATS,
    "sampling.min_p": FLOATS,
    "sampling.seed": NUMBERS,
    "sampling.max_tokens": st.sampled_from([0, 1, 2, 8, 63, 64, 2**32 - 1]),
    "sampling.stop": st.lists(TEXTS, max_size=3) | st.just(["a"] * 1000),
    "sampling.stop_token_ids": MANY_IDS,
    "sampling.ignore_eos": st.booleans(),
    "sampling.repetition_penalty": FLOATS,
    "sampling.presence_penalty": FLOATS,
    "sampling.frequency_penalty": FLOATS,
    "sampling.logit_bias": st.dictionaries(IDS, FLOATS, max_size=4),
    "sampling.allowed_token_ids": MANY_IDS,
    "sampling.bad_words": st.lists(TEXTS, max_size=3) | st.just(["a"] * 1001),
    "sampling.min_tokens": st.sampled_from([0, 1, 4, 5, 2**32 - 1]),
    "sampling.include_stop_str_in_output": st.booleans(),
    "sampling.skip_special_tokens": st.booleans(),
    "sampling.n": st.sampled_from([0, 1, 2, 3, 8, 9, 64, 65, 2**31, 2**32 - 1]),
    "sampling.logprobs": st.sampled_from([0, 1, 20, 21, 2**31, 2**32 - 1]),
    "sampling.prompt_logprobs": st.sampled_from([0, 1, 20, 21, 2**31, 2**32 - 1]),
    "sampling.beam.width": st.sampled_from([0, 1, 2, 3, 8, 9, 16, 17, 2**31, 2**32 - 1]),
    "sampling.beam.length_penalty": FLOATS,
    "sampling.beam.early_stopping": st.sampled_from([0, 1, 2, 3, 99, 2**31 - 1]),
    "received": RECEIVED,
}
CHATS = st.lists(st.tuples(TEXTS, TEXTS), max_size=3)
INPUTS = st.one_of(
    st.tuples(st.just("text"), TEXTS),
    st.tuples(st.just("token_ids"), MANY_IDS),
    st.tuples(st.just("token_ids"), GOOD_IDS),
    st.just(("token_ids", list(VICTIM.prompt))),
    st.tuples(st.just("chat"), CHATS),
    st.just(("none", None)),
)
GENERATE = inference_pb2.GenerateRequest


def request_of(asked: tuple[str, Any], fields: Sequence[tuple[str, Any]]) -> bytes:
    """Builds the message, without the fields that a message cannot carry."""
    message = GENERATE()
    message.sampling.temperature = 0.0
    message.sampling.max_tokens = 4
    match asked:
        case "text", text:
            message.text = text
        case "token_ids", ids:
            message.token_ids.ids.extend(ids)
        case "chat", turns:
            for role, content in turns:
                message.chat.messages.add(role=role, content=content)
    for path, value in fields:
        if path == "received":
            message.received.SetInParent()
            for index, ids, finish in value:
                message.received.sequences.add(index=index, token_ids=ids, finish_reason=finish)
            continue
        *where, name = path.split(".")
        target: Any = message
        for part in where:
            target = getattr(target, part)
        with contextlib.suppress(ValueError):
            if isinstance(value, list):
                getattr(target, name)[:] = value
                target.SetInParent()
            elif isinstance(value, dict):
                getattr(target, name).update(value)
            else:
                setattr(target, name, value)
    return message.SerializeToString()


GENERATES = st.builds(
    request_of,
    INPUTS,
    st.lists(
        st.sampled_from(sorted(FIELDS)).flatmap(lambda f: st.tuples(st.just(f), FIELDS[f])),
        max_size=3,
    ),
)


@dataclass
class Call:
    """One call over gRPC, its message as bytes, and what came of it."""

    method: str
    message: bytes
    status: grpc.StatusCode | None = None
    code: str = ""
    text: str = ""
    tokens: dict[int, list[int]] = field(default_factory=dict)

    async def make(self, channel: aio.Channel) -> None:
        streams = self.method.endswith("/Generate")
        make: Any = channel.unary_stream if streams else channel.unary_unary
        call = make(self.method)(self.message)
        try:
            if streams:
                async for answer in call:
                    self._read(inference_pb2.GenerateResponse.FromString(answer))
            else:
                await call
            self.status = await call.code()
        except aio.AioRpcError as error:
            self.status, self.text = error.code(), error.details() or ""
            self.code = str(dict(error.trailing_metadata() or ()).get(CODE_TRAILER, ""))

    def _read(self, answer: inference_pb2.GenerateResponse) -> None:
        for delta in answer.deltas:
            self.tokens.setdefault(delta.index, []).extend(delta.token_ids)

    def check(self) -> None:
        # A run that upgrades itself, as these bytes may ask it to, refuses to be scaled meanwhile.
        upgrades = self.method.endswith("/Scale") and "an upgrade of this run" in self.text
        assert upgrades or self.status in CLEAR, (self.method, self.status, self.text[:300])
        assert self.status is grpc.StatusCode.OK or (self.text and self.code)  # said by us
        assert len(self.text) < 2000

    def check_tokens(self, deployment: Deployment) -> None:
        """They continue its own prompt."""
        message = GENERATE.FromString(self.message)
        prompt = _prompt(message, deployment)
        if message.sampling.HasField("beam"):  # nothing, or all that it was asked for
            if self.status is not grpc.StatusCode.OK:  # its n may be any number
                assert not self.tokens
                return
            ended = {s.index for s in message.received.sequences}
            assert set(self.tokens) == set(range(max(1, message.sampling.n))) - ended
            return
        received = {s.index: s.token_ids for s in message.received.sequences}
        for index, tokens in self.tokens.items():
            assert tokens == expected((*prompt, *received.get(index, ())), len(tokens))


def _prompt(message: inference_pb2.GenerateRequest, deployment: Deployment) -> tuple[int, ...]:
    match message.WhichOneof("input"):
        case "text":
            return deployment.tokenizer.encode(message.text)
        case "chat":
            turns = (f"{turn.role}:{turn.content};" for turn in message.chat.messages)
            return deployment.tokenizer.encode("".join(turns), add_special_tokens=False)
    return tuple(message.token_ids.ids)


async def calls_beside(deployment: Deployment, calls: Sequence[Call]) -> None:
    async with victim(deployment):
        await asyncio.gather(*(call.make(deployment.channel) for call in calls))
    for call in calls:
        call.check()


@given(messages=st.lists(GENERATES, min_size=1, max_size=4))
@FUZZ
def test_generate(service: tuple[asyncio.Runner, Deployment], messages: Sequence[bytes]) -> None:
    """Wrong values in every field, ids that run already, tokens "received" that nobody sent."""
    runner, deployment = service
    calls = [Call(f"/{SERVICE_NAME}/Generate", message) for message in messages]
    runner.run(calls_beside(deployment, calls))
    for call in calls:
        call.check_tokens(deployment)


# Other methods, and bytes that are no message

SERVICES = [
    inference_pb2.DESCRIPTOR.services_by_name["Inference"],
    block_manager_pb2.DESCRIPTOR.services_by_name["BlockManager"],
    supervisor_pb2.DESCRIPTOR.services_by_name["Supervisor"],
]
METHODS = [f"/{each.full_name}/{method.name}" for each in SERVICES for method in each.methods]
OPERATIONS = st.one_of(
    st.builds(lambda p: block_manager_pb2.AuditRequest(pool_id=p), NAMES | st.just("{pool}")),
    st.builds(lambda w: block_manager_pb2.DrainWorkerRequest(worker_id=w), NAMES),
    st.builds(lambda m: block_manager_pb2.ReloadRequest(model=m), NAMES),
    st.builds(
        lambda p, d: supervisor_pb2.ScaleRequest(num_prefill=p, num_decode=d),
        st.sampled_from([None, 0, 1, 65, 2**32 - 1]),
        st.sampled_from([None, 0, 1, 2, 65, 2**32 - 1]),
    ),
)


def method_of(message: Any) -> str:
    name = message.DESCRIPTOR.name.removesuffix("Request")
    return next(method for method in METHODS if method.endswith(f"/{name}"))


@st.composite
def corrupted(draw: st.DrawFn) -> bytes:
    """A message with bytes cut out, put in, or replaced."""
    message = bytearray(draw(GENERATES))[:2000]
    for _ in range(draw(st.integers(1, 3))):
        at, end = sorted(draw(st.tuples(*[st.integers(0, len(message))] * 2)))
        message[at : min(end, at + 8)] = draw(st.binary(max_size=8))
    return bytes(message)


NESTED = b"\x0b" * 10_000  # groups in groups
RAW = st.one_of(
    st.builds(
        Call, st.sampled_from(METHODS), st.binary(max_size=60) | corrupted() | st.just(NESTED)
    ),
    st.builds(lambda message: Call(method_of(message), message.SerializeToString()), OPERATIONS),
)


@given(calls=st.lists(RAW, min_size=1, max_size=4))
@FUZZ
def test_every_method(service: tuple[asyncio.Runner, Deployment], calls: Sequence[Call]) -> None:
    """Bytes that are not the method's message, not UTF-8, or nested without end; and unknown
    names."""
    runner, deployment = service
    runner.run(calls_beside(deployment, calls))
