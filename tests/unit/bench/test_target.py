"""An OpenAI server's stream is read right wherever its bytes are cut."""

import asyncio
import json
from typing import Any

import pytest

from bench.serving.target import HttpTarget, RequestFailed, server_sent_events

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
EVENTS = b'data: {"n": 1}\n\ndata: {"n": 2}\n\n: comment\ndata: [DONE]\n\n'


def reader(*parts: bytes) -> asyncio.StreamReader:
    result = asyncio.StreamReader()
    result.feed_data(b"".join(parts))
    result.feed_eof()
    return result


def chunked(body: bytes, size: int) -> bytes:
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (*pieces, b""))


async def events(*parts: bytes) -> list[dict[str, Any]]:
    return [event async for event in server_sent_events(reader(*parts))]


@pytest.mark.parametrize("size", [1, 7, 16, 1000])
async def test_chunks_may_cut_a_line_anywhere(size: int) -> None:
    head = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    assert await events(head, chunked(EVENTS, size)) == [{"n": 1}, {"n": 2}]


async def test_a_body_may_end_with_its_connection() -> None:
    assert await events(HEAD, b"\r\n", EVENTS) == [{"n": 1}, {"n": 2}]


async def test_a_stream_that_is_broken_off_is_an_error() -> None:
    head = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    with pytest.raises(RequestFailed, match="connection lost"):
        await events(head, chunked(EVENTS, 16)[:40])


async def test_a_refusal_says_what_the_server_said() -> None:
    with pytest.raises(RequestFailed, match="status 400: too long"):
        await events(b"HTTP/1.1 400 Bad Request\r\n\r\n", b"too long")


class Scripted(HttpTarget):
    """Answers literal events instead of a server's."""

    def __init__(self, *answer: dict[str, Any]) -> None:
        super().__init__("http://127.0.0.1:1", "bench")
        self._answer = answer

    async def _events(self, prompt: object, num_tokens: int) -> Any:
        for event in self._answer:
            yield json.loads(json.dumps(event))


def text(piece: str) -> dict[str, Any]:
    return {"choices": [{"text": piece}]}


def ids(*token_ids: int) -> dict[str, Any]:
    return {"choices": [{"text": "", "token_ids": list(token_ids)}]}


def usage(num_tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"completion_tokens": num_tokens}}


@pytest.mark.parametrize(
    ("answer", "counts"),
    [
        ((ids(7), ids(8, 9), usage(3)), [1, 2]),
        ((text("a"), text("b"), text(""), usage(2)), [1, 1]),
        # a character of three tokens comes as one piece of text
        ((text("a"), text("é"), usage(4)), [1, 1, 2]),
    ],
)
async def test_tokens_are_counted_by_ids_else_by_text_and_usage(
    answer: tuple[dict[str, Any], ...], counts: list[int]
) -> None:
    stream = Scripted(*answer).stream([1], 3)
    assert [count async for count in stream] == counts


async def test_an_error_inside_a_stream_is_an_error() -> None:
    with pytest.raises(RequestFailed, match="out of memory"):
        _ = [count async for count in Scripted(ids(7), {"error": "out of memory"}).stream([1], 3)]
