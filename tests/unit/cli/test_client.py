"""The client library: both clients send the same, receive the same, and fail alike."""

import asyncio
import subprocess
import sys
from typing import Any

import grpc
import pytest

import quire
from quire import AsyncClient, ChatMessage, Choice, Client, Sampling
from quire.messages import Request, generate_request

ERRORS = {
    grpc.StatusCode.INVALID_ARGUMENT: quire.InvalidRequest,
    grpc.StatusCode.NOT_FOUND: quire.NotFound,
    grpc.StatusCode.ALREADY_EXISTS: quire.Conflict,
    grpc.StatusCode.RESOURCE_EXHAUSTED: quire.Overloaded,
    grpc.StatusCode.UNAVAILABLE: quire.Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: quire.DeadlineExceeded,
    grpc.StatusCode.INTERNAL: quire.ServerError,
    grpc.StatusCode.DATA_LOSS: quire.ServerError,
}


def test_a_completion_is_the_sum_of_its_deltas(hello: Any) -> None:
    with Client(hello.address) as client:
        completion = client.complete("Hi", Sampling(max_tokens=3))
    assert completion.text == "Hello, world"
    assert completion.token_ids == (7, 8, 9)
    assert completion.finish_reason == "stop"
    assert completion.usage.num_prompt_tokens == 20


async def test_the_async_client_gets_the_same(hello: Any) -> None:
    async with AsyncClient(hello.address) as client:
        assert (await client.complete("Hi")).text == "Hello, world"


async def test_both_clients_embed(hello: Any) -> None:
    with Client(hello.address) as client:
        found = client.embed("Hi", 2, model="m")
        with pytest.raises(quire.InvalidRequest, match="cannot be sent"):
            client.embed([-1])
    async with AsyncClient(hello.address) as client:
        assert await client.embed([1, 2]) == found
    assert (found.values, found.num_prompt_tokens) == ((0.5, -0.5), 3)
    text, token_ids = hello.requests[-2:]
    assert (text.text, text.dimensions, text.model) == ("Hi", 2, "m")
    assert (list(token_ids.token_ids.ids), token_ids.HasField("dimensions")) == ([1, 2], False)


def test_a_stream_that_is_cut_short_is_an_error(hello: Any) -> None:
    del hello.responses[-1]
    with Client(hello.address) as client, pytest.raises(quire.ServerError):
        client.complete("Hi")


def test_leaving_a_stream_cancels_the_request(hello: Any) -> None:
    hello.endless = True
    with Client(hello.address) as client:
        with client.generate("Hi") as stream:
            assert next(iter(stream)).text == "Hello,"
        assert hello.cancelled.wait(timeout=10)


FORKING = """
import os, sys
from quire import Client, QuireError

client = Client(sys.argv[1])
stream = client.generate("Hi")
deltas = iter(stream)
next(deltas)
if os.fork() == 0:
    for ask in (lambda: next(deltas), client.models, lambda: client.generate("Hi")):
        try:
            ask()
        except QuireError as error:
            print(error.code, flush=True)
    stream.cancel()
    client.close()
    os._exit(0)
os.wait()
print(next(deltas).text)
stream.cancel()
client.close()
"""


def test_a_clients_stream_is_an_error_in_a_forked_child_and_goes_on_in_its_parent(
    hello: Any,
) -> None:
    hello.endless = True
    command = [sys.executable, "-c", FORKING, hello.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=15)
    assert done.stdout.splitlines() == ["forked"] * 3 + [" world"], done.stderr


async def test_closing_an_async_stream_cancels_the_request(hello: Any) -> None:
    hello.endless = True
    async with AsyncClient(hello.address) as client:
        async with client.generate("Hi") as stream:
            assert (await anext(stream)).text == "Hello,"
        assert await asyncio.to_thread(hello.cancelled.wait, 10)


@pytest.mark.parametrize("status", ERRORS, ids=lambda status: status.name)
def test_statuses_have_their_errors(gateway: Any, status: grpc.StatusCode) -> None:
    gateway.refuse(status, "the reason")
    with Client(gateway.address) as client, pytest.raises(quire.QuireError) as error:
        client.models()
    assert type(error.value) is ERRORS[status]
    assert (str(error.value), error.value.code) == ("the reason", "some_code")


def test_overload_says_when_to_come_back(gateway: Any) -> None:
    gateway.refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
    with Client(gateway.address) as client, pytest.raises(quire.Overloaded) as error:
        list(client.generate("Hi"))
    assert error.value.retry_delay_s == 1.5


async def test_an_absent_gateway_differs_from_a_gateway_without_workers() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(quire.Unreachable):
            await client.models()


def test_prompts_of_each_kind() -> None:
    assert generate_request(Request("text")).text == "text"
    assert list(generate_request(Request([1, 2])).token_ids.ids) == [1, 2]
    chat = generate_request(Request([ChatMessage("user", "Hi")])).chat
    assert [(m.role, m.content) for m in chat.messages] == [("user", "Hi")]


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [(["A", "B"], "str"), ([1, "B"], "str"), ([{"role": "user", "content": "A"}], "dict")],
)
def test_a_list_that_is_no_prompt_is_named(prompt: Any, kind: str) -> None:
    """Several texts are several requests."""
    wanted = f"the prompt is a list with a {kind} in it; a request has one prompt: a text, a list"
    with Client("127.0.0.1:1") as client, pytest.raises(quire.InvalidRequest, match=wanted):
        client.complete(prompt)


def test_an_empty_prompt_is_for_the_server_to_refuse() -> None:
    assert generate_request(Request([])).WhichOneof("input") == "token_ids"


def test_samples_of_a_completion_are_choices(samples: Any) -> None:
    with Client(samples.address) as client:
        completion = client.complete("Hi", Sampling(n=2))
    assert samples.requests[0].sampling.n == 2
    assert completion.choices == (
        Choice(0, "one two", (7, 7), "length"),
        Choice(1, "eins zwei", (7, 7), "stop", "drei"),
    )
    assert completion.text == "one two"
    assert completion.usage.num_generated_tokens == 4
