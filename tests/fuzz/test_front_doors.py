"""Arbitrary client input to the gateway, over gRPC and HTTP: each request gets tokens of its own
prompt or a clear status, nothing hangs or is left behind, and the request of another client is not
disturbed."""

import asyncio
import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.v1 import block_manager_pb2, inference_pb2, supervisor_pb2
from services.common.rpc.interceptor import CODE_TRAILER
from services.gateway.frontend.api import GenerationRequest, RequestedSampling
from services.gateway.frontend.service import SERVICE_NAME
from tests.fuzz.deployment import LIMIT_S, VOCAB, Deployment, deployed, expected

pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")
FUZZ = settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
CLEAR = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}
CLEAR_HTTP = {200, 400, 404, 405, 409, 413, 429}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[tuple[asyncio.Runner, Deployment]]:
    with deployed(tmp_path) as running:
        yield running


# Somebody else's request

VICTIM = GenerationRequest(
    tuple(range(200, 210)),
    "victim",
    sampling=RequestedSampling(temperature=0.0, max_tokens=40),
    cache_salt="the victim's own",
)


@contextlib.asynccontextmanager
async def victim(deployment: Deployment) -> Any:
    """A request of another client that runs during the block; after it, the request has all its
    tokens, and nothing else is left."""
    tokens: list[int] = []

    async def read() -> None:
        async with contextlib.aclosing(deployment.assembly.gateway.generate(VICTIM)) as deltas:
            async for delta in deltas:
                tokens.extend(delta.token_ids)

    reading = asyncio.create_task(read())
    await deployment.until(lambda: bool(tokens) or reading.done())
    async with asyncio.timeout(LIMIT_S):
        yield
        await reading
    assert tokens == expected(VICTIM.prompt, 40)  # type: ignore[arg-type]
    await deployment.until_idle()


# gRPC

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
    "sampling.best_of": st.sampled_from([0, 1, 2, 3, 8, 9, 64, 65, 2**32 - 1]),
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
    """The request without values that a message cannot carry."""
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
    """One call over gRPC: the bytes of its message, and its outcome."""

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
        assert self.status in CLEAR, (self.method, self.status, self.text[:300])
        assert self.status is grpc.StatusCode.OK or (self.text and self.code)  # said by us
        assert len(self.text) < 2000

    def check_tokens(self, deployment: Deployment) -> None:
        """The tokens continue the call's own prompt."""
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
    """Wrong values in every field, ids of running requests, and "received" tokens that were never
    sent."""
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
    st.builds(lambda p: block_manager_pb2.ListHoldersRequest(pool_id=p), NAMES | st.just("pool")),
    st.builds(lambda w: block_manager_pb2.DrainWorkerRequest(worker_id=w), NAMES),
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
def spoiled(draw: st.DrawFn) -> bytes:
    """A message with bytes removed, inserted or replaced."""
    message = bytearray(draw(GENERATES))[:2000]
    for _ in range(draw(st.integers(1, 3))):
        at, end = sorted(draw(st.tuples(*[st.integers(0, len(message))] * 2)))
        message[at : min(end, at + 8)] = draw(st.binary(max_size=8))
    return bytes(message)


NESTED = b"\x0b" * 10_000  # groups in groups
RAW = st.one_of(
    st.builds(Call, st.sampled_from(METHODS), st.binary(max_size=60) | spoiled() | st.just(NESTED)),
    st.builds(lambda message: Call(method_of(message), message.SerializeToString()), OPERATIONS),
)


@given(calls=st.lists(RAW, min_size=1, max_size=4))
@FUZZ
def test_every_method(service: tuple[asyncio.Runner, Deployment], calls: Sequence[Call]) -> None:
    """Bytes that are not the method's message, not UTF-8, or nested without end; and unknown
    names."""
    runner, deployment = service
    runner.run(calls_beside(deployment, calls))


# HTTP

HUGE = "9" * 4300  # all that Python turns into a number
JSON_VALUES = st.sampled_from(
    [
        *("null", "true", "0", "1", "-1", "2.5", "1e400", "-1e400", HUGE, f"-{HUGE}", "9" * 5000),
        *('""', '"a"', '"hello"', '"\\ud800"', '"\\u0000"', '"victim"', '"nobody"', "NaN"),
        *("[]", "{}", "[[]]", "[1, 2]", f"[{HUGE}]", '["a", "b"]', "[1.0]", "[-1]", "[[1], [2]]"),
        *("[" * 5000, "[" * 500 + "]" * 500, '{"a":' * 500 + "1" + "}" * 500),
        *('[{"role": "user", "content": "hi"}]', '[{"role": 1}]', '[{"role": "", "content": ""}]'),
        *('[{"role": "\\udfff", "content": "\\ud800"}]', '{"include_usage": true}', "1" * 300_000),
        *(json.dumps("x" * 300_000), json.dumps(["a"] * 200), json.dumps([[1]] * 200)),
    ]
)
HTTP_FIELDS = st.sampled_from(
    [
        *("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature"),
        *("top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "stream", "stream_options"),
        *("cache_salt", "priority", "request_id", "return_token_ids", "ignore_eos", "user"),
        *("n", "logprobs", "logit_bias", "tools", "response_format", "nobody", "\\ud800"),
        *("use_beam_search", "length_penalty", "early_stopping", "prompt_logprobs", "echo"),
        *("top_logprobs", "best_of", "beam_width", "received", "resume_token"),
    ]
)
PATHS = st.sampled_from(["/v1/completions", "/v1/chat/completions"])
GOT = st.builds(
    '{{"index": {}, "token_ids": {}, "finish_reason": {}}}'.format,
    st.sampled_from(["0", "0", "1", "-1", HUGE]),
    st.sampled_from(["[]", "[97]", "[97, 98]", "[-1]", f"[{HUGE}]", '["a"]']),
    st.sampled_from(["null", "null", '"stop"', '"abort"', "1"]),
)
NEW: st.SearchStrategy[dict[str, str]] = st.just({})
GOING_ON: st.SearchStrategy[dict[str, str]] = st.lists(GOT, max_size=2).map(
    lambda got: {
        "stream": "true",
        "request_id": '"r1"',
        "resume_token": f'"{"t" * 22}"',
        "received": f"[{', '.join(got)}]",
    }
)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, str, bytes]:
    path = draw(PATHS)
    chat = '[{"role": "user", "content": "hi"}]'
    fields = {"max_tokens": "4", "temperature": "0"}
    fields |= {"messages": chat} if "chat" in path else {"prompt": '"hello"'}
    fields |= draw(NEW | GOING_ON)
    fields |= dict(draw(st.lists(st.tuples(HTTP_FIELDS, JSON_VALUES), max_size=3)))
    return "POST", path, ("{" + ", ".join(f'"{k}": {v}' for k, v in fields.items()) + "}").encode()


ELSEWHERE = st.tuples(
    st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"]),
    st.sampled_from(
        [
            *("/v1/models", "/v1/models/toy", "/v1/models/%ff%00", "/v1/models/" + "x" * 5000),
            *("/health", "/metrics", "/", "//", "/v1/completions", "/v1/../v1/models", "/%2e%2e"),
        ]
    ),
    st.binary(max_size=20),
)
ANY_HTTP = (
    bodies() | bodies() | st.tuples(st.just("POST"), PATHS, st.binary(max_size=60)) | ELSEWHERE
)


async def http_beside(deployment: Deployment, asked: Sequence[tuple[str, str, bytes]]) -> None:
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    async with victim(deployment):
        answers = await asyncio.gather(
            *(
                deployment.http.request(method, path, content=content, headers=headers)
                for method, path, content in asked
            )
        )
    for answer, (method, _, content) in zip(answers, asked, strict=True):
        assert answer.status_code in CLEAR_HTTP, (answer.status_code, answer.text[:300])
        assert len(answer.content) < 20_000, content[:300]
        if answer.status_code != 200 and method != "HEAD":
            assert answer.json()["error"]["message"]


@given(asked=st.lists(ANY_HTTP, min_size=1, max_size=4))
@FUZZ
def test_http(
    service: tuple[asyncio.Runner, Deployment], asked: Sequence[tuple[str, str, bytes]]
) -> None:
    """JSON of wrong types, huge numbers, lone surrogates, and text that is not JSON."""
    runner, deployment = service
    runner.run(http_beside(deployment, asked))


# Tokenizing


def test_what_is_tokenized_comes_back(service: tuple[asyncio.Runner, Deployment]) -> None:
    runner, deployment = service

    async def there_and_back() -> None:
        http = deployment.http
        answer = (await http.post("/tokenize", json={"prompt": "hello", "model": "toy"})).json()
        expected_ids = list(deployment.tokenizer.encode("hello"))
        assert (answer["tokens"], answer["count"]) == (expected_ids, len(expected_ids))
        text = await http.post("/detokenize", json={"tokens": answer["tokens"]})
        assert text.json() == {"prompt": "hello"}
        assert (await http.post("/tokenize", json={"prompt": ""})).json()["count"] == 0
        for path, body, param in (
            ("/detokenize", {"tokens": [VOCAB]}, "tokens"),
            ("/detokenize", {"tokens": [-1]}, "tokens"),
            ("/tokenize", {"prompt": "x", "model": "nobody"}, "model"),
            ("/tokenize", {"messages": []}, "messages"),
        ):
            refused = await http.post(path, json=body)
            assert refused.status_code in (400, 404)
            assert refused.json()["error"]["param"] == param

    runner.run(there_and_back())
