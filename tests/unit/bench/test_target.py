"""The stream of an OpenAI server is read right wherever it is cut, and its tokens are counted."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from quire.bench.target import Chunk, RequestFailed, _chunk, _lines

EVENTS = b'data: {"n": 1}\n\ndata:{"n": 2}\r\n\n: comment\nevent: x\ndata: [DONE]\n\n'


class Pieces:
    """A body that arrives in pieces of `size` bytes."""

    def __init__(self, size: int) -> None:
        self._size = size

    async def iter_any(self) -> AsyncIterator[bytes]:
        for start in range(0, len(EVENTS), self._size):
            yield EVENTS[start : start + self._size]


@pytest.mark.parametrize("size", [1, 7, 16, 1000])
async def test_pieces_may_cut_a_line_anywhere(size: int) -> None:
    pieces: Any = Pieces(size)
    assert [line async for line in _lines(pieces)] == [b'{"n": 1}', b'{"n": 2}', b"[DONE]"]


def text(piece: str) -> dict[str, Any]:
    return {"choices": [{"text": piece}]}


def ids(*token_ids: int) -> dict[str, Any]:
    return {"choices": [{"text": "", "token_ids": list(token_ids)}]}


@pytest.mark.parametrize(
    ("event", "count"), [(ids(7), 1), (ids(8, 9), 2), (text("a"), 1), (text("é"), 1)]
)
def test_tokens_are_counted_by_ids_else_by_text(event: dict[str, Any], count: int) -> None:
    chunk = _chunk(event)
    assert chunk is not None
    assert chunk.num_tokens == count
    assert _chunk(text("")) is None


def test_an_error_inside_a_stream_is_an_error() -> None:
    with pytest.raises(RequestFailed, match="out of memory"):
        _chunk({"error": "out of memory"})


def test_chats_have_content_and_reasoning_and_a_first_event_without_either() -> None:
    assert _chunk({"choices": [{"delta": {"role": "assistant", "content": ""}}]}) is None
    assert _chunk({"choices": [{"delta": {"content": "a"}}]}) == Chunk(1, "a")
    assert _chunk({"choices": [{"delta": {"reasoning_content": "b"}}]}) == Chunk(1, "b")
    both = {"reasoning": "b", "reasoning_content": "b"}
    assert _chunk({"choices": [{"delta": {"reasoning": "b"}}]}) == Chunk(1, "b")
    assert _chunk({"choices": [{"delta": both}]}) == Chunk(1, "b")
    last = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}
    assert _chunk(last) == Chunk(0, "", 5, 2)
