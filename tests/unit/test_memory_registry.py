"""The registry in memory: its members, and their times to live."""

from dataclasses import replace

from blockstore.registry import Load, Member, Registry
from tests.clock import Clock
from tests.memory_registry import MemoryRegistry

MEMBER = Member("d1", "decode", "127.0.0.1:1", "serving", started_unix_ms=0, protocol_version=1)


async def test_a_member_is_gone_after_its_time_unless_it_is_refreshed() -> None:
    clock = Clock()
    registry: Registry = MemoryRegistry(clock)
    other = replace(MEMBER, member_id="d0")
    await registry.announce(MEMBER, ttl_s=5)
    await registry.announce(other, ttl_s=5)
    assert await registry.members() == (other, MEMBER)

    clock.now_s += 4
    refreshed = replace(MEMBER, load=Load(num_running=1))
    await registry.announce(refreshed, ttl_s=5)
    clock.now_s += 1
    assert await registry.members() == (refreshed,)

    clock.now_s += 4
    assert await registry.members() == ()


async def test_withdrawing_twice_is_no_error() -> None:
    registry: Registry = MemoryRegistry()
    await registry.announce(MEMBER, ttl_s=5)
    await registry.withdraw("d1")
    await registry.withdraw("d1")

    assert await registry.members() == ()
    await registry.close()


async def test_arrivals_are_the_clock_and_never_the_same_twice() -> None:
    clock = Clock()
    registry: Registry = MemoryRegistry(clock)

    assert [await registry.next_arrival() for _ in range(3)] == [100_000, 100_001, 100_002]
    clock.now_s += 5
    assert await registry.next_arrival() == 105_000
