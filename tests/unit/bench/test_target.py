"""An OpenAI server's stream is read right wherever it is cut, and its tokens are counted."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from bench.serving.target import Counted, RequestFailed
from quire.bench.target import Call, Chunk, _chunk, _lines

EVENTS = b'data: {"n": 1}\n\ndata:{"n": 2}\r\n\n: comment\nevent: x\ndata: [DONE]\n\n'


class Pieces:
    """A body that comes in pieces of `size` bytes."""

    def __init__(self, size: int) -> None:
        self._size = size

    async def iter_any(self) -> AsyncIterator[bytes]:
        for start in range(0, len(EVENTS), self._size):
            yield EVENTS[start : start + self._size]


@pytest.mark.parametrize("size", [1, 7, 16, 1000])
async def test_pieces_may_cut_a_line_anywhere(size: int) -> None:
    pieces: Any = Pieces(size)
    assert [line async for line in _lines(pieces)] == [b'{"n": 1}', b'{"n": 2}', b"[DONE]"]


class Scripted:
    """Answers literal events instead of a server's."""

    def __init__(self, *answer: dict[str, Any]) -> None:
        self._answer = answer

    async def stream(self, call: Call) -> Any:
        for event in self._answer:
            if (chunk := _chunk(json.loads(json.dumps(event)))) is not None:
                yield chunk

    async def close(self) -> None:
        pass


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
    stream = Counted(Scripted(*answer)).stream([1], 3)
    assert [count async for count in stream] == counts


async def test_an_error_inside_a_stream_is_an_error() -> None:
    stream = Counted(Scripted(ids(7), {"error": "out of memory"})).stream([1], 3)
    with pytest.raises(RequestFailed, match="out of memory"):
        _ = [count async for count in stream]


def test_chats_have_content_and_reasoning_and_a_first_event_without_either() -> None:
    assert _chunk({"choices": [{"delta": {"role": "assistant", "content": ""}}]}) is None
    assert _chunk({"choices": [{"delta": {"content": "a"}}]}) == Chunk(1, "a")
    assert _chunk({"choices": [{"delta": {"reasoning_content": "b"}}]}) == Chunk(1, "b")
    last = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}
    assert _chunk(last) == Chunk(0, "", 5, 2)
