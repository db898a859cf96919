"""The registry on a real server."""

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from typing import Any

import pytest

from blockstore.redis_registry import RedisRegistry, decode, encode
from blockstore.registry import Load, Member
from tests.conftest import Valkey
from tests.secret import OTHER, SECRET

KEY = SECRET.registry_key

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
    registry = await RedisRegistry.connect(valkey.url, KEY)
    yield registry
    await registry.close()


async def test_members_are_read_back_as_they_were_announced(registry: RedisRegistry) -> None:
    """Every field is kept, and members are sorted by id."""
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
    """The time to live runs on the server's clock; the next reader removes expired ids."""
    await registry.announce(WORKER, ttl_s=0.05)
    await registry.announce(GATEWAY, ttl_s=60)
    async with asyncio.timeout(5):
        while await registry.members() != (GATEWAY,):
            pass
    assert valkey.command("SMEMBERS", "{quire}:members") == {b"g1"}


async def test_usage_is_kept_by_minute_for_a_day(registry: RedisRegistry, valkey: Valkey) -> None:
    await registry.set_usage(7, "g1", "a")
    await registry.set_usage(7, "g1", "b")
    await registry.set_usage(9, "g2", "c")
    assert await registry.usage(6, 9) == [{}, {"g1": "b"}, {}, {"g2": "c"}]
    assert 86_400 < valkey.command("TTL", "{quire}:usage:7") <= 90_000


async def test_arrivals_are_counted_for_all_gateways_together(
    registry: RedisRegistry, valkey: Valkey
) -> None:
    other = await RedisRegistry.connect(valkey.url, KEY)
    numbers = [await each.next_arrival() for each in (registry, other, registry, other)]
    assert numbers == sorted(set(numbers))
    for _ in range(2):
        wait_for_the_clock(numbers[-1])
        valkey.command("FLUSHALL")
        numbers += [await each.next_arrival() for each in (other, registry)]
    await other.close()
    assert numbers == sorted(set(numbers))


async def test_arrivals_go_on_at_a_server_whose_clock_is_behind(
    registry: RedisRegistry, valkey: Valkey
) -> None:
    """After a fail-over: it has neither the last arrival nor the time for it."""
    ahead = round(time.time() * 1000) + 3_600_000
    valkey.command("ZADD", "{quire}:arrivals", str(ahead), "arrivals")
    assert await registry.next_arrival() == ahead + 1
    valkey.command("FLUSHALL")
    assert [await registry.next_arrival() for _ in range(2)] == [ahead + 2, ahead + 3]


async def test_an_arrival_is_the_servers_clock_in_milliseconds(registry: RedisRegistry) -> None:
    began = time.time() * 1000
    wait_for_the_clock(await registry.next_arrival())
    arrival = await registry.next_arrival()
    assert began - 1 <= arrival <= time.time() * 1000 + 1


async def test_an_arrival_takes_one_exchange_and_no_task(
    registry: RedisRegistry, valkey: Valkey
) -> None:
    """Every task and every exchange costs a request turns of the event loop. The stream's own task
    exists before."""
    await registry.next_arrival()
    loop, tasks = asyncio.get_running_loop(), list[Any]()

    def count_task(_: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        tasks.append(work)
        return asyncio.Task(work, **options)

    valkey.command("CONFIG", "RESETSTAT")
    loop.set_task_factory(count_task)
    await registry.next_arrival()
    loop.set_task_factory(None)
    executed = valkey.command("INFO", "commandstats")
    assert (executed["cmdstat_fcall"]["calls"], tasks) == (1, [])


async def test_arrivals_go_on_after_a_loss_of_the_functions(own_valkey: Valkey) -> None:
    registry = await RedisRegistry.connect(own_valkey.url, KEY)
    first = await registry.next_arrival()
    own_valkey.command("FUNCTION", "FLUSH")
    assert await registry.next_arrival() > first
    await registry.close()


def wait_for_the_clock(arrival: int) -> None:
    """Wait until the clock is ahead of the counter, as it is at less than a thousand arrivals a
    second."""
    while time.time() * 1000 <= arrival:
        pass


async def test_an_old_counter_is_left_behind(own_valkey: Valkey) -> None:
    """The counter was restored from a file."""
    registry = await RedisRegistry.connect(own_valkey.url, KEY)
    before = await registry.next_arrival()
    own_valkey.command("SAVE")
    before = [before, *[await registry.next_arrival() for _ in range(100)]][-1]
    wait_for_the_clock(before)
    own_valkey.kill()
    own_valkey.start()
    other = await RedisRegistry.connect(own_valkey.url, KEY)
    assert own_valkey.command("ZSCORE", "{quire}:arrivals", "arrivals") < before
    numbers = [await each.next_arrival() for each in (other, registry, other)]
    assert numbers == sorted(set(numbers))
    assert numbers[0] > before
    await registry.close()
    await other.close()


def test_unknown_fields_of_a_newer_member_are_ignored() -> None:
    """A newer release may announce more fields than this one knows."""
    newer = asdict(WORKER) | {"gpu_uuid": "GPU-1"}
    newer["load"] |= {"num_parked": 2}
    text = json.dumps(newer).encode()
    code = hmac.digest(KEY, b"{quire}:member:w1\n" + text, "sha256").hex()
    assert decode("w1", f"{code} ".encode() + text, KEY) == WORKER


def forged(member: Member) -> dict[str, str]:
    """Entries that a process without the secret could write, by their fault."""
    text = json.dumps(asdict(member))
    elsewhere = encode(member, KEY).replace(member.address, "127.0.0.1:6666")
    return {
        "not signed": text,
        "an empty signature": f" {text}",
        "another deployment's": encode(member, OTHER.registry_key),
        "signed with another key of this deployment": encode(member, SECRET.rpc_key),
        "another address": elsewhere,
        "nothing": "",
        "no text at all": "\x00\udcff",
        "another member's entry": encode(replace(member, member_id="w2"), KEY),
    }


@pytest.mark.parametrize("what", forged(WORKER))
async def test_an_entry_without_the_signature_is_left_out_and_reported_once(
    valkey: Valkey, what: str
) -> None:
    reported: list[str] = []
    registry = await RedisRegistry.connect(valkey.url, KEY, on_refused=reported.append)
    await registry.announce(GATEWAY, ttl_s=60)
    entry = forged(WORKER)[what].encode(errors="surrogateescape")
    valkey.command("SET", "{quire}:member:w1", entry)
    valkey.command("SADD", "{quire}:members", "w1")
    assert [await registry.members() for _ in range(3)] == 3 * [(GATEWAY,)]
    assert reported == ["w1"]
    await registry.announce(WORKER, ttl_s=60)
    assert await registry.members() == (GATEWAY, WORKER)
    await registry.close()


async def test_ids_that_are_no_text_do_not_stop_readers(
    registry: RedisRegistry, valkey: Valkey
) -> None:
    await registry.announce(WORKER, ttl_s=60)
    valkey.command("SADD", "{quire}:members", b"\xff\xfe")
    assert await registry.members() == (WORKER,)
