"""Waiting for a condition, as the tests do it."""

import asyncio
from itertools import count

import pytest

from tests.waiting import until, wait_until


async def test_the_first_answer_that_holds_is_returned() -> None:
    numbers = count()

    async def ask() -> int:
        return next(numbers)

    assert await until(ask, lambda number: number > 2) == 3
    assert await until(lambda: next(numbers), lambda number: number > 6) == 7
    assert wait_until(lambda: next(numbers), lambda number: number > 9) == 10


async def test_a_wait_in_vain_says_what_it_saw_last() -> None:
    def refuse() -> bool:
        raise ConnectionError("nobody listens")

    said = "waited 0.01 s in vain; the last answer: "
    with pytest.raises(TimeoutError, match=f"{said}7\nits log"):
        await until(lambda: 7, lambda number: number > 7, limit_s=0.01, explain=lambda: "its log")
    with pytest.raises(TimeoutError, match="the last answer: ConnectionError"):
        await until(refuse, limit_s=0.01, not_yet=(ConnectionError,))
    with pytest.raises(TimeoutError, match=f"{said}None"):
        await until(asyncio.Event().wait, limit_s=0.01)  # it never answers
    with pytest.raises(TimeoutError, match=f"{said}False\nits log"):
        wait_until(lambda: False, limit_s=0.01, explain=lambda: "its log")


async def test_an_error_that_is_not_expected_ends_the_wait() -> None:
    with pytest.raises(ZeroDivisionError):
        await until(lambda: 1 // 0)
