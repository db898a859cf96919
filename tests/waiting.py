"""Waits for a condition, and says what it saw last if the condition does not come. A pause between
two looks is a tenth of the time waited so far: a wait takes little longer than it must, and a long
one costs little CPU."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from inspect import isawaitable
from typing import Any, TypedDict, TypeVar, Unpack, overload

LIMIT_S = 60.0
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.05

T = TypeVar("T")


class How(TypedDict, total=False):
    """The keywords of `until`."""

    limit_s: float
    longest_pause_s: float
    not_yet: tuple[type[Exception], ...]
    explain: Callable[[], str]


@overload
async def until(
    ask: Callable[[], Awaitable[T]], holds: Callable[[T], object] = ..., **how: Unpack[How]
) -> T: ...
@overload
async def until(
    ask: Callable[[], T], holds: Callable[[T], object] = ..., **how: Unpack[How]
) -> T: ...
async def until(
    ask: Callable[[], Any],
    holds: Callable[[Any], object] = bool,
    *,
    limit_s: float = LIMIT_S,
    longest_pause_s: float = LONGEST_PAUSE_S,
    not_yet: tuple[type[Exception], ...] = (),
    explain: Callable[[], str] = str,
) -> Any:
    """Wait until an answer of `ask` holds, and return it. `not_yet`: errors of `ask` that count as
    an answer that does not hold. TimeoutError, with the last answer or error and what `explain`
    says: none held within the limit."""
    last: Any = None
    try:
        async with asyncio.timeout(limit_s) as limit:
            for pause_s in _pauses(longest_pause_s, asyncio.get_running_loop().time):
                try:
                    asked = ask()
                    last = await asked if isawaitable(asked) else asked
                except not_yet as error:
                    last = error
                else:
                    if holds(last):
                        return last
                await asyncio.sleep(pause_s)
    except TimeoutError:
        if limit.expired():
            raise TimeoutError(_in_vain(limit_s, last, explain)) from None
        raise
    raise AssertionError("there is always a next pause")


def wait_until(
    ask: Callable[[], T],
    holds: Callable[[T], object] = bool,
    *,
    limit_s: float = LIMIT_S,
    explain: Callable[[], str] = str,
) -> T:
    """`until` outside of an event loop. It does not interrupt `ask`."""
    deadline = time.monotonic() + limit_s
    for pause_s in _pauses(LONGEST_PAUSE_S, time.monotonic):
        if holds(answer := ask()):
            return answer
        if time.monotonic() > deadline:
            raise TimeoutError(_in_vain(limit_s, answer, explain))
        time.sleep(pause_s)
    raise AssertionError("there is always a next pause")


def _pauses(longest_s: float, clock: Callable[[], float]) -> Iterator[float]:
    began = clock()
    while True:
        yield min(max(SHORTEST_PAUSE_S, (clock() - began) / 10), longest_s)


def _in_vain(limit_s: float, last: object, explain: Callable[[], str]) -> str:
    return f"waited {limit_s:g} s in vain; the last answer: {last!r}\n{explain()}".rstrip()
