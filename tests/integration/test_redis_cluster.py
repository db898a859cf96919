"""Several pools on a cluster of three primaries: each pool is on one node, and a node's failures
affect only its pools."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from blockstore.acl import acl_file
from blockstore.redis import keys
from blockstore.redis_registry import RedisRegistry
from blockstore.redis_store import RedisStore
from blockstore.registry import Member
from blockstore.store import FUNCTION_LIBRARY
from tests.integration.ledger_workers import Worker, assert_whole, joined, make_directory
from tests.secret import SECRET
from tests.valkey_topologies import Cluster, TcpValkey, cluster
from tests.waiting import until, wait_until


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("cluster"), with_replicas=True) as made:
        yield made


def pool_of(nodes: Cluster, node: TcpValkey, test: str) -> str:
    """The id of a pool whose keys are on this node."""
    return next(
        pool_id
        for pool_id in (f"{test}-{number}" for number in range(1000))
        if nodes.owner(keys.pool_tag(pool_id)) is node
    )


@pytest.fixture
async def pools(
    nodes: Cluster, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[list[list[Worker]]]:
    """Two workers on each of three pools, one pool on each node, and one holder each."""
    primaries = [node for node in nodes.nodes if node.info()["role"] == "master"]
    async with AsyncExitStack() as stack:
        found = []
        for node in primaries:
            pool_id = pool_of(nodes, node, request.node.name)
            directory = make_directory(tmp_path, pool_id)
            workers = await stack.enter_async_context(joined(nodes.url, directory, "v", "w"))
            await workers[0].allocate("first", 1, 3)
            found.append(workers)
        yield found


async def assert_all_whole(pools: list[list[Worker]]) -> None:
    for workers in pools:
        assert await workers[0].grow("first", 1, 3, 4) == (3,)
        await workers[1].allocate("last", 2, 2)
        await assert_whole(workers)


def restart(node: TcpValkey) -> None:
    node.kill()
    node.start()


async def test_every_pool_is_on_one_node(nodes: Cluster, pools: list[list[Worker]]) -> None:
    """The nodes have the functions, and the keys of their own pool only."""
    await assert_all_whole(pools)
    ids = [workers[0].pool_id for workers in pools]
    for pool_id in ids:
        node = nodes.owner(keys.pool_tag(pool_id))
        assert node.command("KEYS", f"{{{pool_id}}}:*")
        others = [pool for pool in ids if pool != pool_id]
        assert not any(node.command("KEYS", f"{{{pool}}}:*") for pool in others)
        assert FUNCTION_LIBRARY in str(node.command("FUNCTION", "LIST"))
    store = await RedisStore.connect(nodes.url)
    assert set(ids) <= set(await store.pool_ids())
    await store.close()


async def test_a_waiter_is_notified_by_the_node_of_its_pool(pools: list[list[Worker]]) -> None:
    for v, w in pools:
        waiting = asyncio.create_task(w.store.wait_for_room(w.pool_id, 60))
        await asyncio.sleep(0)
        for number in range(1000):
            await v.allocate(f"h{number}", 9, 1)
            await v.store.release(v.pool_id, f"h{number}", 1)
            if (await asyncio.wait([waiting], timeout=0.02))[0]:
                break
        assert waiting.done()


async def test_a_registry_is_on_one_node(nodes: Cluster) -> None:
    registry = await RedisRegistry.connect(nodes.url, SECRET.registry_key)
    member = Member("gateway-1", "gateway", "h:1", "serving", 0, 1)
    await registry.announce(member, 60)
    assert await registry.members() == (member,)
    first = await registry.next_arrival()
    assert await registry.next_arrival() > first
    await registry.withdraw("gateway-1")
    await registry.close()


async def test_the_user_of_the_acl_file_may_do_what_a_cluster_needs(
    nodes: Cluster, tmp_path: Path
) -> None:
    user = acl_file("pw").splitlines()[1].split()[1:]
    for node in nodes.nodes:
        node.command("ACL", "SETUSER", *user)
    url = nodes.url.replace("redis://", "redis://quire:pw@")
    async with joined(url, make_directory(tmp_path, "acl"), "v", "w") as (v, w):
        await v.allocate("a", 1, 3)
        await w.store.wait_for_room("acl", 0.05)
        await assert_whole([v, w])


async def test_pools_of_a_restarted_node_are_rebuilt_and_no_others(
    nodes: Cluster, pools: list[list[Worker]]
) -> None:
    lost = nodes.owner(keys.pool_tag(pools[0][0].pool_id))
    restart(lost)
    await assert_all_whole(pools)
    epochs = [(await workers[0].store.stats(workers[0].pool_id)).ledger_epoch for workers in pools]
    assert epochs == [2, 1, 1]


async def test_the_set_of_pools_is_filled_again(nodes: Cluster, pools: list[list[Worker]]) -> None:
    """Also when only the node with the set loses it."""
    lost = nodes.owner(keys.POOLS)
    ids = {workers[0].pool_id for workers in pools}
    restart(lost)
    store = await RedisStore.connect(nodes.url)
    await until(store.pool_ids, lambda now: ids <= set(now), limit_s=10)
    await store.close()


@pytest.mark.parametrize("crashes", [False, True])
async def test_workers_report_their_ledger_to_a_promoted_replica(
    nodes: Cluster, pools: list[list[Worker]], crashes: bool
) -> None:
    """After a requested failover, and after a crash of the primary."""
    tag = keys.pool_tag(pools[0][0].pool_id)
    old = nodes.owner(tag)
    (replica,) = (
        node
        for node in nodes.nodes
        if node.info()["role"] == "slave" and int(node.info()["master_port"]) == old.port
    )
    if crashes:
        old.kill()
    else:
        replica.command("CLUSTER", "FAILOVER")
    wait_until(lambda: nodes.owner(tag) is replica)
    await assert_all_whole(pools)
    assert (await pools[0][0].store.stats(pools[0][0].pool_id)).ledger_epoch == 2
    if crashes:
        old.start()
        wait_until(lambda: old.info().get("master_link_status") == "up")


async def test_a_pool_follows_its_slot_to_another_node(
    nodes: Cluster, pools: list[list[Worker]]
) -> None:
    """While the slot moves, calls wait; then the workers report the ledger to the new node."""
    (v, w), tag = pools[0], keys.pool_tag(pools[0][0].pool_id)
    target = nodes.owner(keys.pool_tag(pools[1][0].pool_id))
    end = nodes.move(tag, target)
    growing = asyncio.create_task(v.grow("first", 1, 3, 4))
    claimed = asyncio.create_task(w.allocate("last", 2, 2))
    assert (await asyncio.wait([growing, claimed], timeout=0.2))[0] == set()
    await asyncio.to_thread(end)
    assert set(await growing).isdisjoint((0, 1, 2, *await claimed))
    await assert_whole([v, w])
    assert nodes.owner(tag) is target
