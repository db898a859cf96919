"""Several gateways share the workers, and a client continues at another one when its own is
lost."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

from blockstore.registry import Member
from quire import AsyncClient, Client
from quire.messages import Request
from quire.types import Sampling
from quire.v1 import decode_pb2, inference_pb2, sampling_pb2
from tests.proxy import Proxy
from tests.waiting import until

from .conftest import PROMPT, TOKEN, GatewayHarness
from .fakes import FakeDecode, FakePrefill, Verbatim, expected

TEXT = bytes(expected(PROMPT, 8)).decode()


class Reader:
    """The deltas that a client library's user receives of one request."""

    def __init__(self, client: AsyncClient, **fields: Any) -> None:
        self.tokens: list[int] = []
        self.text = ""
        sampling = Sampling(temperature=0.0, max_tokens=8, **fields.pop("sampling", {}))
        self._request = Request(list(PROMPT), sampling, **fields)
        self.task = asyncio.create_task(self._read(client))

    async def _read(self, client: AsyncClient) -> None:
        async with client.send(self._request, timeout_s=60.0) as deltas:
            async for delta in deltas:
                self.tokens += delta.token_ids
                self.text += delta.text

    async def has(self, num_tokens: int) -> None:
        await until(lambda: len(self.tokens) == num_tokens or self.task.done())

    async def end(self) -> None:
        async with asyncio.timeout(20):
            await self.task


class Two:
    """Two gateways, each behind a proxy, and a client that knows both."""

    def __init__(self, first: GatewayHarness, second: GatewayHarness, proxies: list[Proxy]) -> None:
        self.first = first
        self.second = second
        self.proxies = proxies
        self.address = ",".join(proxy.address for proxy in proxies)


@pytest.fixture
async def workers() -> tuple[FakePrefill, FakeDecode]:
    return FakePrefill(), FakeDecode()


@pytest.fixture
async def two(make_harness: Any, workers: Any) -> AsyncIterator[Two]:
    first = await make_harness(*workers)
    second = await first.another()
    async with AsyncExitStack() as stack:
        proxies = [
            await stack.enter_async_context(Proxy(await harness.listen()))
            for harness in (first, second)
        ]
        yield Two(first, second, proxies)


@pytest.fixture
async def client(two: Two) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(two.address) as client:
        yield client


@pytest.mark.parametrize("received", [0, 1, 5])
async def test_a_stream_goes_on_at_the_other_gateway(
    two: Two, client: AsyncClient, workers: Any, received: int
) -> None:
    """No token and no character is lost, repeated or changed; received tokens are not decoded
    again."""
    prefill, decode = workers
    prefill.holds, decode.pause_after = received == 0, received
    reader = Reader(client)
    await reader.has(received)
    await until(lambda: bool(prefill.held or decode.running))

    await two.proxies[0].close()
    prefill.let_go()
    decode.go_on(pause_after=8)
    await reader.end()
    assert (reader.tokens, reader.text) == (expected(PROMPT, 8), TEXT)
    last = prefill.submitted[-1]
    assert list(last.sequences[0].token_ids) == expected(PROMPT, received)
    await until(lambda: not decode.slots)  # the first gateway has seen its client go


async def test_the_client_of_threads_goes_on_at_the_other_gateway(two: Two, workers: Any) -> None:
    """It decides as the one of asyncio does: see tests/unit/cli/test_progress.py."""
    prefill, _ = workers
    prefill.holds = True
    with Client(two.address) as client:
        greedy = Sampling(temperature=0.0, max_tokens=8)
        complete = asyncio.to_thread(client.complete, list(PROMPT), greedy, timeout_s=60.0)
        asked = asyncio.create_task(complete)
        await until(lambda: bool(prefill.held))
        await two.proxies[0].close()
        await until(lambda: len(prefill.submitted) == 2 or asked.done())
        prefill.let_go()
        assert (await asked).token_ids == tuple(expected(PROMPT, 8))


async def test_a_parked_sequence_goes_on_where_it_was(
    two: Two, client: AsyncClient, workers: Any
) -> None:
    """Nothing is computed again: the ticket is that of the first gateway, with its place in the
    queue. Tokens generated after the client's last one come too."""
    prefill, decode = workers
    decode.parks, decode.pause_after = True, 3
    reader = Reader(client)
    await reader.has(3)
    two.proxies[0].hold()
    decode.go_on(pause_after=5)
    await until(lambda: all(r.num_generated == 5 for r in decode.running.values()))
    await two.first.lose_workers()
    await until(lambda: bool(decode.parked))
    await two.proxies[0].close()
    decode.go_on(pause_after=8)
    await reader.end()
    assert (reader.tokens, reader.text) == (expected(PROMPT, 8), TEXT)
    assert len(prefill.submitted) == 1
    first, again = (admit.ticket for admit in decode.commands(decode_pb2.Admit))
    assert (again.order, again.holder_id) == (first.order, first.holder_id)
    assert list(again.sequences[0].token_ids) == expected(PROMPT, 5)


async def test_a_gateway_that_stops_leaves_its_sequences(
    two: Two, client: AsyncClient, workers: Any
) -> None:
    """Its clients get an error, and continue at the other gateway with the parked requests."""
    prefill, decode = workers
    decode.parks, decode.pause_after = True, 3
    reader = Reader(client)
    await reader.has(3)
    await until(lambda: bool(decode.running))
    other = Member("gateway-2", "gateway", "127.0.0.1:1", "serving", 1, 1)
    await two.first.registry.announce(other, ttl_s=1e6)
    await until(lambda: two.first.assembly.directory.another_gateway_serves)
    await two.first.assembly.dispatcher.close()
    await two.first.lose_workers()
    decode.go_on(pause_after=8)
    await reader.end()
    assert (reader.tokens, reader.text) == (expected(PROMPT, 8), TEXT)
    assert len(prefill.submitted) == 1
    assert not decode.aborted


# ── what a gateway is asked to go on with ────────────────────────────────────────────────────────


def message(num_received: int | None, **changes: Any) -> inference_pb2.GenerateRequest:
    """Eight greedy tokens for PROMPT, some of which the client has; None: a new request."""
    fields: dict[str, Any] = {"request_id": "r1", "prompt": PROMPT, "temperature": 0.0} | changes
    asked = inference_pb2.GenerateRequest(
        request_id=fields["request_id"],
        resume_token=fields.get("resume_token", TOKEN),
        token_ids=inference_pb2.TokenIds(ids=fields["prompt"]),
        sampling=sampling_pb2.SamplingParams(
            temperature=fields["temperature"],
            seed=fields.get("seed"),
            max_tokens=8,
            stop=fields.get("stop", ()),
        ),
    )
    if num_received is not None:
        received = fields.get("received", expected(PROMPT, num_received))
        asked.received.sequences.add(token_ids=received)
    return asked


async def tokens_of(call: Any, so_far: list[int] | None = None) -> list[int]:
    """All tokens of a call; `so_far` gets them while the call runs."""
    tokens: list[int] = [] if so_far is None else so_far
    async with asyncio.timeout(10):
        async for response in call:
            tokens += [token for delta in response.deltas for token in delta.token_ids]
    return tokens


async def test_a_call_goes_on_with_what_another_one_runs(harness: Any) -> None:
    """The client has lost its connection, and the gateway does not know it yet. The new call takes
    the request over, gets the tokens that were sent in vain, and nothing is computed again."""
    prefill, decode = harness.workers
    stub = await harness.serve()
    decode.pause_after = 5
    lost = stub.Generate(message(None))
    received: list[int] = []
    refused = asyncio.create_task(tokens_of(lost, received))
    await until(lambda: len(received) == 5)
    going_on = stub.Generate(message(3))
    with pytest.raises(grpc.RpcError) as told:
        await refused
    assert told.value.code() is grpc.StatusCode.ALREADY_EXISTS
    decode.go_on(pause_after=8)
    assert await tokens_of(going_on) == expected(PROMPT, 8)[3:]
    assert len(prefill.submitted) == 1


@pytest.mark.parametrize(
    ("num_received", "changes"),
    [
        *((None, {}), (2, {"prompt": b"another"}), (2, {"temperature": 1.0, "seed": 7})),
        *((2, {"received": [97, 97]}), (6, {})),
    ],
    ids=["a new request", "another prompt", "other draws", "other tokens", "more than there are"],
)
async def test_a_client_goes_on_with_the_same_request_only(
    harness: Any, num_received: int | None, changes: dict[str, Any]
) -> None:
    _, decode = harness.workers
    stub = await harness.serve()
    decode.pause_after = 5
    tokens: list[int] = []
    mine = asyncio.create_task(tokens_of(stub.Generate(message(None)), tokens))
    await until(lambda: len(tokens) == 5)
    with pytest.raises(grpc.RpcError) as refused:
        await tokens_of(stub.Generate(message(num_received, **changes)))
    assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS
    decode.go_on(pause_after=8)
    assert await mine == expected(PROMPT, 8)


@pytest.mark.parametrize("num_received", [None, 0, 3, 5])
@pytest.mark.parametrize("is_parked", [False, True])
async def test_another_client_neither_gets_a_request_nor_learns_of_it(
    two: Two, workers: Any, num_received: int | None, is_parked: bool
) -> None:
    """A client with the id, the body and even the tokens is served as a new one. The owner's
    request then goes on, and nothing of it is computed again."""
    prefill, decode = workers
    prefill.names, decode.names = Verbatim(), Verbatim()
    decode.parks, decode.pause_after = True, 5
    stub = await two.first.serve()
    tokens: list[int] = []
    mine = asyncio.create_task(tokens_of(stub.Generate(message(None)), tokens))
    await until(lambda: len(tokens) == 5)
    if is_parked:
        await two.first.lose_workers()
        await until(lambda: bool(decode.parked))
        mine.cancel()
        stub = await two.second.serve()
    decode.pause_after = 8
    other = message(num_received, resume_token="of another client, 128 bits")
    assert await tokens_of(stub.Generate(other)) == expected(PROMPT, 8)[num_received or 0 :]
    assert len(prefill.submitted) == 2
    if is_parked:
        assert await tokens_of(stub.Generate(message(5))) == expected(PROMPT, 8)[5:]
    else:
        assert await mine == expected(PROMPT, 8)
    assert len(prefill.submitted) == 2


async def test_the_first_response_brings_the_token(harness: Any) -> None:
    """A client that sends no resume token can resume, too."""
    prefill, decode = harness.workers
    stub = await harness.serve()
    decode.pause_after = 3
    responses: list[inference_pb2.GenerateResponse] = []
    lost = stub.Generate(message(None, resume_token=""))
    while sum(len(one.deltas[0].token_ids) for one in responses) < 3:
        responses.append(await lost.read())
    told, *empty = (response.resume_token for response in responses)
    assert len(told) == 43  # 256 bits
    assert not any(empty)
    going_on = stub.Generate(message(3, resume_token=told))
    with pytest.raises(grpc.RpcError):  # the other call took over
        await lost.read()
    decode.go_on(pause_after=8)
    assert await tokens_of(going_on) == expected(PROMPT, 8)[3:]
    assert len(prefill.submitted) == 1


@pytest.mark.parametrize(
    ("num_received", "changes", "problem"),
    [
        (0, {"request_id": ""}, "received needs the request_id and the resume_token"),
        (0, {"resume_token": ""}, "received needs the request_id and the resume_token"),
        (1, {"temperature": 1.0}, "only be continued with its seed"),
        (8, {}, "8 tokens received, max_tokens is 8"),
        (1, {"received": [300]}, "received"),
        (6, {"stop": [TEXT[2:4]]}, "a stop string is in the tokens received"),
    ],
)
async def test_a_resume_that_is_impossible_is_refused(
    make_harness: Any, workers: Any, num_received: int, changes: dict[str, Any], problem: str
) -> None:
    harness = await make_harness(*workers)
    stub = await harness.serve()
    with pytest.raises(grpc.RpcError, match=problem) as refused:
        await tokens_of(stub.Generate(message(num_received, **changes)))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not workers[0].seen
