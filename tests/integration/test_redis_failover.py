"""A replicated server whose replica becomes the primary, by a Sentinel or by an operator."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from blockstore.errors import StoreUnavailable, StoreUnsuitable
from blockstore.redis.locator import Locator
from blockstore.redis_registry import RedisRegistry
from blockstore.redis_store import RedisStore
from services.pool.directory import PoolDirectory
from tests.integration.ledger_workers import assert_whole, joined, make_directory
from tests.secret import SECRET
from tests.valkey_topologies import TcpValkey, replicated, sentinel
from tests.waiting import wait_until


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[TcpValkey]]:
    with replicated(tmp_path) as made:
        yield made


@pytest.fixture
def directory(tmp_path: Path) -> PoolDirectory:
    return make_directory(tmp_path)


async def test_workers_report_their_ledger_to_a_sentinels_new_primary(
    servers: list[TcpValkey], directory: PoolDirectory, tmp_path: Path
) -> None:
    """Calls wait until the Sentinel has replaced the crashed primary."""
    with sentinel(tmp_path / "sentinel", servers[0]) as url:
        async with joined(url, directory, "v", "w") as (v, w):
            await v.allocate("a", 1, 3)
            await w.allocate("b", 2, 2)
            registry = await RedisRegistry.connect(url, SECRET.registry_key, retry_for_s=20)
            arrival = await registry.next_arrival()
            servers[0].kill()
            assert await v.grow("a", 1, 3, 4) == (5,)
            assert servers[1].info()["role"] == "master"
            await assert_whole([v, w])
            assert (await v.store.stats("pool")).ledger_epoch == 2
            assert await registry.next_arrival() > arrival
            await registry.close()


async def test_the_new_primary_among_several_hosts_is_found(
    servers: list[TcpValkey], directory: PoolDirectory
) -> None:
    """An operator moves the primary, and moves it back: each move is a new history of the data."""
    first, second = servers
    url = f"redis://127.0.0.1:{first.port},127.0.0.1:{second.port}/0"
    async with joined(url, directory, "v", "w") as (v, w):
        await v.allocate("a", 1, 3)
        for number, (old, new) in enumerate([(first, second), (second, first)]):
            old.command("FAILOVER")
            await asyncio.to_thread(wait_until, old.is_replicating)
            assert await v.grow("a", 1, 3 + number, 4 + number) == (3 + number,)
            assert new.info()["role"] == "master"
            assert (await v.store.stats("pool")).ledger_epoch == 2 + number
        await assert_whole([v, w])


async def test_writes_that_a_failover_lost_are_sent_again(
    servers: list[TcpValkey], directory: PoolDirectory
) -> None:
    """The replica has an old ledger, which no worker accepts."""
    first, second = servers
    url = f"redis://127.0.0.1:{first.port},127.0.0.1:{second.port}/0"
    async with joined(url, directory, "v", "w") as (v, w):
        await v.allocate("old", 1, 5)
        second.command("REPLICAOF", "NO", "ONE")
        await v.store.release("pool", "old", 1)
        assert len(await w.allocate("new", 2, 5)) == 5
        assert second.command("EXISTS", "{pool}:holder:old") == 1
        first.command("REPLICAOF", "127.0.0.1", second.port)  # its own writes are lost
        assert await w.grow("new", 1, 5, 6) == (5,)
        assert [h.holder_id for h in await v.store.holders("pool")] == ["new"]
        await assert_whole([v, w])


async def test_a_replica_alone_is_refused(servers: list[TcpValkey]) -> None:
    with pytest.raises(StoreUnsuitable, match="give the URL of its primary"):
        await RedisStore.connect(servers[1].url)


async def test_hosts_without_a_primary_are_an_outage(servers: list[TcpValkey]) -> None:
    """One of them may become the primary at any time."""
    port = servers[1].port
    with pytest.raises(StoreUnavailable, match=f"port {port} is a slave now"):
        await RedisStore.connect(f"redis://127.0.0.1:{port},127.0.0.1:{port}")


async def test_a_sentinel_says_which_services_it_lacks(
    servers: list[TcpValkey], tmp_path: Path
) -> None:
    with sentinel(tmp_path / "sentinel", servers[0]) as url:
        with pytest.raises(StoreUnsuitable, match="knows no service 'other'"):
            await RedisStore.connect(url.replace("/ledger", "/other"))
        with pytest.raises(StoreUnsuitable, match="is a sentinel: write sentinel://"):
            await RedisStore.connect(url.replace("sentinel", "redis").replace("/ledger", ""))


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("sentinel://h:26379", "name the service"),
        ("redis://a:1,b:x", "port|int"),
        ("redis://a:1,b:2?colour=blue", "colour"),
    ],
)
def test_a_malformed_url_of_several_hosts_is_refused(url: str, text: str) -> None:
    with pytest.raises(StoreUnsuitable, match=text):
        Locator(url, "{pool}", {})


def test_logins_of_servers_and_sentinels_are_apart() -> None:
    """A Sentinel never gets the servers' password, nor do they get the Sentinel's."""
    url = "sentinels://quire:pw@a:1,b:2/ledger/3?sentinel_password=spw&ssl_ca_certs=/ca.pem"
    found = Locator(url, "{pool}", {})
    assert "pw" not in found.url.replace("sentinel_password", "").replace("quire:***", "")
    for server, asked in zip(found._hosts, found._sentinels, strict=True):
        assert (server["username"], server["password"], server["db"]) == ("quire", "pw", 3)
        assert (asked.get("username"), asked["password"]) == (None, "spw")
        assert "db" not in asked
        assert server["ssl_ca_certs"] == asked["ssl_ca_certs"] == "/ca.pem"
        assert "sentinel_password" not in server | asked
