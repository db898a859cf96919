"""Hostile requests are refused by their content before it becomes objects."""

import asyncio
import json
import tracemalloc
from collections.abc import Callable

import pytest
from google.protobuf.message import DecodeError
from starlette.requests import Request
from starlette.types import Message

from quire.v1 import inference_pb2, sampling_pb2
from services.gateway.chat.prompts import MAX_MESSAGES
from services.gateway.http.bodies.bounds import (
    MAX_CONTAINERS,
    MAX_STRINGS,
    MAX_VALUES,
    check_counts,
)
from services.gateway.http.bodies.fields import MAX_FIELDS as MAX_FIELDS_OF_OBJECT
from services.gateway.http.bodies.reading import read_body
from services.gateway.http.bodies.schema import ChatBody, CompletionBody
from services.gateway.http.middleware.body_limits import MAX_BODY_BYTES
from services.runtime.errors import InvalidRequest
from services.runtime.rpc.message_bounds import MAX_FIELDS, MAX_PACKED_VALUES
from services.runtime.rpc.message_bounds import check_counts as check_message


def full(begin: str, item: str, end: str, separator: str = ",") -> bytes:
    """A body of the largest size, with one item repeated."""
    number = (MAX_BODY_BYTES - len(begin) - len(end)) // (len(item) + len(separator))
    return (begin + separator.join([item] * number) + end).encode()


HOSTILE: dict[str, Callable[[], bytes]] = {
    "empty strings": lambda: full('{"prompt": "x", "stop_token_ids": [', '""', "]}"),
    "unknown fields": lambda: full('{"prompt": "x", ', '"f": 0', "}"),
    "small numbers": lambda: full('{"prompt": [', "0", "]}"),
    "empty prompts": lambda: full('{"prompt": [', "[]", "]}"),
    "empty messages": lambda: full('{"messages": [', "{}", "]}"),
    "received": lambda: full('{"prompt": "x", "received": [', "{}", "]}"),
    "open lists": lambda: b"[" * MAX_BODY_BYTES,
    "an end that never comes": lambda: full('{"prompt": [', "[]", ""),
}


async def read(body: bytes, model: type[CompletionBody | ChatBody]) -> CompletionBody | ChatBody:
    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return await read_body(Request({"type": "http"}, receive), model)


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("model", [CompletionBody, ChatBody])
async def test_a_hostile_body_is_refused_within_three_times_its_size(
    name: str, model: type[CompletionBody | ChatBody]
) -> None:
    """16 MiB beside the body itself; without bounds, some bodies became 11 GB."""
    body = HOSTILE[name]()
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match="at most") as caught:
            await read(body, model)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * MAX_BODY_BYTES
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop_token_ids": [""] * 1000}, "stop_token_ids[0]: Input should be a valid integer"),
        ({"bad_words": [1] * 1000}, "bad_words[0]: Input should be a valid string"),
        ({"messages": [{}] * 1000}, "messages[0].role: Field required"),
    ],
)
async def test_a_list_is_read_as_far_as_its_first_wrong_item(
    fields: dict[str, object], message: str
) -> None:
    body = json.dumps({"messages": [], **fields}).encode()
    with pytest.raises(InvalidRequest) as caught:
        await read(body, ChatBody)
    assert message in str(caught.value)
    assert "[1]" not in str(caught.value)


async def test_an_object_of_too_many_fields_has_one_error() -> None:
    body = json.dumps({f"f{number}": 0 for number in range(MAX_FIELDS_OF_OBJECT + 1)}).encode()
    with pytest.raises(InvalidRequest, match="an object of 129 fields, at most 128"):
        await read(body, ChatBody)


async def test_a_large_body_is_read_beside_the_event_loop() -> None:
    """The event loop runs while the body is parsed."""
    body = json.dumps({"prompt": list(range(MAX_VALUES // 2))}).encode()
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    turning = asyncio.create_task(turn())
    read_body = await read(body, CompletionBody)
    turning.cancel()
    assert isinstance(read_body, CompletionBody)
    assert read_body.prompt == (tuple(range(MAX_VALUES // 2)),)
    assert turns > 1


def text_of(value: object) -> bytes:
    return json.dumps(value).encode()


@pytest.mark.parametrize(
    ("most", "body"),
    [
        (MAX_VALUES, lambda number: text_of([0] * (number - 1))),
        (MAX_STRINGS, lambda number: text_of([""] * number)),
        (MAX_STRINGS, lambda number: text_of({"a": ["b"] * (number - 1)})),
        (MAX_CONTAINERS, lambda number: text_of([[]] * (number - 1))),
        (MAX_CONTAINERS, lambda number: text_of([{}] * (number - 1))),
    ],
)
def test_bounds_are_exact(most: int, body: Callable[[int], bytes]) -> None:
    check_counts(body(most))
    with pytest.raises(InvalidRequest, match=f"the body has {most + 1} .*, at most {most}"):
        check_counts(body(most + 1))


@pytest.mark.parametrize(
    "text", ["[{:,", '"', "\\", '\\"', '\\\\"', "[\\\\\\", "\n,", '"[', "é,\U0001f600"]
)
def test_text_does_not_count(text: str) -> None:
    """Text with any number of quotes and backslashes."""
    check_counts(text_of({"prompt": text * MAX_VALUES}))
    check_counts(json.dumps({"prompt": text * MAX_VALUES}, ensure_ascii=False).encode())


def repeated(message: inference_pb2.GenerateRequest, unit: bytes, tag: int) -> bytes:
    """The message with another field that contains the unit many times."""
    content = unit * ((12 << 20) // len(unit))
    size, number = b"", len(content)
    while number > 127:
        size, number = size + bytes([number & 127 | 128]), number >> 7
    return message.SerializeToString() + bytes([tag << 3 | 2]) + size + bytes([number]) + content


@pytest.mark.parametrize(
    ("tag", "unit"),
    [
        (5, b"\x0a\x00"),  # chat messages
        (6, b"\x3a\x00"),  # stop strings
        (4, b"\x08\x01"),  # token ids, one by one
        (10, b"\x0a\x00"),  # received sequences
        (6, b"\xf8\x07\x01"),  # fields that nobody knows
    ],
)
def test_a_hostile_message_is_refused_before_it_is_decoded(tag: int, unit: bytes) -> None:
    data = repeated(inference_pb2.GenerateRequest(model="m"), unit, tag)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match=f"more than {MAX_FIELDS} fields"):
            check_message(data, inference_pb2.GenerateRequest)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


def test_packed_numbers_are_counted() -> None:
    request = inference_pb2.GenerateRequest()
    request.token_ids.ids.extend([300] * MAX_PACKED_VALUES)
    check_message(request.SerializeToString(), type(request))
    request.token_ids.ids.append(300)
    with pytest.raises(InvalidRequest, match=f"{MAX_PACKED_VALUES + 1} values"):
        check_message(request.SerializeToString(), type(request))


def test_a_large_honest_message_passes() -> None:
    """The longest possible chat, with all other fields of a request."""
    request = inference_pb2.GenerateRequest(
        request_id="r",
        priority=-3,
        sampling=sampling_pb2.SamplingParams(
            temperature=0.5,
            stop=["stop"] * 64,
            stop_token_ids=range(1024),
            logit_bias=dict.fromkeys(range(1024), 1.0),
            bad_words=["bad"] * 1000,
            beam=sampling_pb2.BeamSearch(width=4, length_penalty=0.5),
        ),
    )
    for _ in range(MAX_MESSAGES):
        request.chat.messages.add(role="user", content="What is a block table?")
    check_message(request.SerializeToString(), type(request))


@pytest.mark.parametrize("data", [b"\x1a\x7f", b"\x1a", b"\x08" + b"\x80" * 100_000, b"\x0b"])
def test_malformed_messages_are_not_decoded(data: bytes) -> None:
    with pytest.raises(DecodeError):
        check_message(data, inference_pb2.GenerateRequest)
