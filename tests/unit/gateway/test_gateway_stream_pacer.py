"""Streams that have tokens at the same time are written a few in each iteration of the event
loop."""

import asyncio
from typing import Any

from services.gateway.streaming.output import Output
from services.gateway.streaming.pacer import HELD_TURNS, LONGEST_REST_S, TURNS_PER_CALL, StreamPacer
from services.protocol.ticket import FinishReason

from .walk import Walk


class Turns:
    """Counts the iterations of the event loop."""

    def __init__(self) -> None:
        self.number = 0
        self._next()

    def _next(self) -> None:
        self.number += 1
        asyncio.get_running_loop().call_soon(self._next)


async def passes(pacer: StreamPacer, count: int) -> list[int]:
    """The iterations in which the waiting streams go on, when all begin to wait in the same one;
    the first is 0."""
    turns, passed = Turns(), []

    async def one() -> None:
        await pacer.wait()
        passed.append(turns.number)

    await asyncio.gather(*(one() for _ in range(count)))
    return [turn - passed[0] for turn in passed]


async def test_a_few_go_on_in_each_turn() -> None:
    """A waiting stream is woken in the next iteration, and goes on in the one after that."""
    assert await passes(StreamPacer(streams_per_turn=2), 7) == [0, 0, 2, 2, 3, 3, 4]


async def test_a_lone_reader_does_not_wait() -> None:
    pacer = StreamPacer(streams_per_turn=1)
    for _ in range(3):
        assert await passes(pacer, 1) == [0]
        await asyncio.sleep(0)


async def test_readers_go_on_in_the_order_of_arrival() -> None:
    pacer, order = StreamPacer(streams_per_turn=1), list[int]()

    async def one(number: int) -> None:
        await pacer.wait()
        order.append(number)

    async with asyncio.TaskGroup() as tasks:
        for number in range(4):
            tasks.create_task(one(number))
        await asyncio.sleep(0)
        tasks.create_task(one(4))
    assert order == [0, 1, 2, 3, 4]


async def test_a_cancelled_reader_delays_no_other() -> None:
    pacer = StreamPacer(streams_per_turn=1)
    waiting = [asyncio.create_task(pacer.wait()) for _ in range(4)]
    await asyncio.sleep(0)
    for task in waiting[1:3]:
        task.cancel()
    async with asyncio.timeout(10):
        await waiting[3]


async def test_tokens_that_come_while_a_reader_waits_are_read_together() -> None:
    """In either order: a stream that waits for its turn has no cost per token."""
    pacer = StreamPacer(streams_per_turn=1)
    outputs = [_watched(Walk().output, pacer) for _ in range(2)]
    read = [asyncio.create_task(_deltas(output)) for output in outputs]
    await asyncio.sleep(0)
    for output in outputs:
        output.write(0, (1,), None)
    await asyncio.sleep(0)
    for output in outputs:
        output.write(0, (2,), FinishReason.LENGTH)
    async with asyncio.timeout(10):
        assert [await each for each in read] == [[(1,), (2,)], [(1, 2)]]


class Clock:
    """The running loop's clock, set by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        loop: Any = asyncio.get_running_loop()
        loop.time = lambda: self.now


async def _turns(count: int = 8) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def _pass(pacer: StreamPacer, clock: Clock, takes_s: tuple[float, ...]) -> None:
    """Run so many streams at once, each until it waits again."""

    async def one(seconds: float) -> None:
        await pacer.wait()
        clock.now += seconds

    await asyncio.gather(*map(one, takes_s))
    await _turns()


async def test_the_pacer_pauses_as_long_as_all_reads_took() -> None:
    """Streams that always have tokens leave half of the loop's time to all else."""
    clock, pacer = Clock(), StreamPacer(streams_per_turn=2, rest_ratio=1.0)
    await _pass(pacer, clock, (0.003, 0.004, 0.005))
    late = asyncio.create_task(pacer.wait())
    clock.now += 0.011
    await _turns()
    assert not late.done()
    clock.now += 0.002
    await _turns()
    assert late.done()


async def test_a_reader_after_the_pause_does_not_wait() -> None:
    clock, pacer = Clock(), StreamPacer(streams_per_turn=1, rest_ratio=1.0)
    await _pass(pacer, clock, (0.01,))
    clock.now += 0.011
    await _turns()
    assert await passes(pacer, 1) == [0]


async def test_a_read_that_took_no_time_is_followed_by_no_pause() -> None:
    clock, pacer = Clock(), StreamPacer(streams_per_turn=1, rest_ratio=1.0)
    await _pass(pacer, clock, (0.0004, 0.0004))
    late = asyncio.create_task(pacer.wait())
    await _turns()
    assert late.done()


async def test_a_loop_that_stood_still_rests_no_longer_than_others() -> None:
    clock, pacer = Clock(), StreamPacer(streams_per_turn=1, rest_ratio=1.0)
    await _pass(pacer, clock, (30.0,))
    late = asyncio.create_task(pacer.wait())
    clock.now += 1.01 * LONGEST_REST_S
    await _turns()
    assert late.done()


async def test_a_call_holds_streams_back_for_some_turns() -> None:
    """Only streams that already write: nothing else delays the next call."""
    pacer = StreamPacer(streams_per_turn=1, rest_ratio=0.0)
    pacer.hold()
    await pacer.wait()
    pacer.hold()
    held = asyncio.create_task(pacer.wait())
    await _turns(TURNS_PER_CALL)
    assert not held.done()
    await _turns(4)
    assert held.done()
    assert await passes(pacer, 1) == [0]


async def test_calls_do_not_hold_streams_back_for_ever() -> None:
    """With a call in every iteration."""
    pacer, num_turns = StreamPacer(streams_per_turn=1, rest_ratio=0.0), 0
    waiting = asyncio.gather(*(pacer.wait() for _ in range(8)))
    while not waiting.done() and num_turns < 1000:
        await asyncio.sleep(0)
        pacer.hold()
        num_turns += 1
    assert HELD_TURNS < num_turns <= HELD_TURNS + 8 + 4


async def test_every_delta_waits_for_its_turn() -> None:
    """Also a delta that was there when the one before it was written."""
    pacer, num_waits = StreamPacer(), 0
    wait = pacer.wait

    async def counted() -> None:
        nonlocal num_waits
        num_waits += 1
        await wait()

    pacer.wait = counted  # type: ignore[method-assign]
    output = _watched(Walk().output, pacer)
    output.write(0, (1,), None)
    deltas = output.deltas()
    assert [(await anext(deltas)).token_ids] == [(1,)]
    output.write(0, (2,), FinishReason.LENGTH)
    assert [(await anext(deltas)).token_ids] == [(2,)]
    assert num_waits == 2
    await deltas.aclose()


def _watched(output: Output, pacer: StreamPacer) -> Output:
    output._pacer = pacer
    return output


async def _deltas(output: Output) -> list[tuple[int, ...]]:
    found = []
    async for delta in output.deltas():
        found.append(delta.token_ids)
        if delta.usage is not None:
            break
    return found
