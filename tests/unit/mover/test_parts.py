"""A long pull reads part after part, each within a time limit of its own."""

import asyncio

import pytest

from services.mover import pull as pulling
from services.mover.pull import PullFailed
from tests.clock import Clock

from .pools import BLOCK_BYTES, World
from .test_pull import TOKENS, has_read, nothing_came

TIMEOUT_S = 20.0


@pytest.mark.parametrize("share", [0.9, 1.1])
async def test_the_time_limit_is_that_of_a_part(
    monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """Nine parts of 18 s each come within 20 s each; a part of 22 s is late."""
    clock = Clock()
    monkeypatch.setattr(pulling, "PART_BLOCKS", 1)
    world = await World.make()
    world.clock = clock

    def take_time(_: int) -> None:
        clock.now_s += share * TIMEOUT_S

    world.transport.before_read = take_time
    pull = world.pull(await world.detached(TOKENS), TIMEOUT_S)
    if share < 1:
        assert await pull.run() is not None
        assert len(world.transport.reads) == 9
        assert pull.reading_s == pytest.approx(3 * share * TIMEOUT_S)
    else:
        with pytest.raises(PullFailed, match="given_up"):
            await pull.run()
        assert len(world.transport.reads) == 1
        await nothing_came(world)


async def test_a_pull_that_is_given_up_waits_for_its_part_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pulling, "PART_BYTES", BLOCK_BYTES)
    world = await World.make(lands=False)
    pull = world.pull(await world.detached(TOKENS))
    running = asyncio.create_task(pull.run())
    for number in range(2):
        await has_read(world, number + 1)
        world.transport.reads[number].land()
    await has_read(world, 3)
    pull.give_up()
    assert await world.num_held("b") == 3, "the second block may still land"
    world.transport.reads[2].land()
    with pytest.raises(PullFailed, match="given_up"):
        await running
    assert len(world.transport.reads) == 3, "the third block was not asked for"
    await nothing_came(world)


async def test_a_part_without_an_end_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the last one, long after the pull has begun."""
    clock = Clock()
    monkeypatch.setattr(pulling, "PART_BLOCKS", 1)
    world = await World.make(lands=False)
    world.clock = clock
    running = asyncio.create_task(
        world.pull(await world.detached(TOKENS), TIMEOUT_S, landing_s=10.0).run()
    )
    for number in range(5):
        await has_read(world, number + 1)
        clock.now_s += 0.9 * TIMEOUT_S
        world.transport.reads[number].land()
    await has_read(world, 6)
    clock.now_s += TIMEOUT_S + 10.0
    await asyncio.sleep(0.01)
    assert not running.done()
    clock.now_s += 0.1
    done, _ = await asyncio.wait([running], timeout=5)
    assert done
    assert "10.1 s ago and has no end" in world.ended[0]
