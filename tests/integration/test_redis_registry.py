"""The registry on a real server."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, replace

import pytest

from blockstore.redis_registry import RedisRegistry, decode
from blockstore.registry import Load, Member
from tests.conftest import Valkey

WORKER = Member(
    member_id="w1",
    role="decode",
    address="127.0.0.1:5001",
    state="serving",
    started_unix_ms=1_700_000_000_000,
    protocol_version=1,
    pool_id="p1",
    model="tiny",
    model_dir="/models/tiny",
    max_model_len=4096,
    max_num_seqs=64,
    load=Load(num_running=3, num_free_slots=61),
    engine={"backend": "reference", "threads": "2"},
)
GATEWAY = Member("g1", "gateway", "127.0.0.1:50051", "starting", 1, 1)


@pytest.fixture
async def registry(valkey: Valkey) -> AsyncIterator[RedisRegistry]:
    registry = await RedisRegistry.connect(valkey.url)
    yield registry
    await registry.close()


async def test_members_are_read_back_as_they_were_announced(registry: RedisRegistry) -> None:
    """Every field survives, and members come sorted by id."""
    await registry.announce(WORKER, ttl_s=60)
    await registry.announce(GATEWAY, ttl_s=60)
    assert await registry.members() == (GATEWAY, WORKER)


async def test_a_heartbeat_replaces_what_was_announced(registry: RedisRegistry) -> None:
    await registry.announce(WORKER, ttl_s=60)
    draining = replace(WORKER, state="draining", load=Load(num_running=1))
    await registry.announce(draining, ttl_s=60)
    assert await registry.members() == (draining,)


async def test_withdrawing_is_immediate_and_may_be_repeated(registry: RedisRegistry) -> None:
    await registry.announce(WORKER, ttl_s=60)
    await registry.withdraw(WORKER.member_id)
    await registry.withdraw(WORKER.member_id)
    assert await registry.members() == ()


async def test_a_member_without_heartbeats_is_gone_and_its_id_is_forgotten(
    registry: RedisRegistry, valkey: Valkey
) -> None:
    """The time to live runs on the server's clock; whoever looks next cleans up."""
    await registry.announce(WORKER, ttl_s=0.05)
    await registry.announce(GATEWAY, ttl_s=60)
    async with asyncio.timeout(5):
        while await registry.members() != (GATEWAY,):
            pass
    assert valkey.command("SMEMBERS", "{quire}:members") == {b"g1"}


async def test_arrivals_are_counted_for_all_gateways_together(
    registry: RedisRegistry, valkey: Valkey
) -> None:
    other = await RedisRegistry.connect(valkey.url)
    numbers = [await each.next_arrival() for each in (registry, other, registry, other)]
    assert numbers == sorted(set(numbers))
    for _ in range(2):
        wait_for_the_clock(numbers[-1])
        valkey.command("FLUSHALL")
        numbers += [await each.next_arrival() for each in (other, registry)]
    await other.close()
    assert numbers == sorted(set(numbers))


async def test_an_arrival_is_the_servers_clock_in_milliseconds(registry: RedisRegistry) -> None:
    began = time.time() * 1000
    wait_for_the_clock(await registry.next_arrival())
    arrival = await registry.next_arrival()
    assert began - 1 <= arrival <= time.time() * 1000 + 1


def wait_for_the_clock(arrival: int) -> None:
    """To be ahead, as it is at less than a thousand arrivals a second."""
    while time.time() * 1000 <= arrival:
        pass


async def test_an_old_counter_is_left_behind(own_valkey: Valkey) -> None:
    """One that came back from a file."""
    registry = await RedisRegistry.connect(own_valkey.url)
    before = await registry.next_arrival()
    own_valkey.command("SAVE")
    before = [before, *[await registry.next_arrival() for _ in range(100)]][-1]
    wait_for_the_clock(before)
    own_valkey.kill()
    own_valkey.start()
    other = await RedisRegistry.connect(own_valkey.url)
    assert own_valkey.command("ZSCORE", "{quire}:arrivals", "arrivals") < before
    numbers = [await each.next_arrival() for each in (other, registry, other)]
    assert numbers == sorted(set(numbers))
    assert numbers[0] > before
    await registry.close()
    await other.close()


def test_unknown_fields_of_a_newer_member_are_ignored() -> None:
    """A newer release may announce more than this one knows."""
    newer = asdict(WORKER) | {"gpu_uuid": "GPU-1"}
    newer["load"] |= {"num_parked": 2}
    assert decode(json.dumps(newer).encode()) == WORKER
