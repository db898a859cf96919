"""A cluster and a Sentinel whose clients come with TLS: each server that they are sent to shows a
certificate with the announced name."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from blockstore.errors import StoreUnavailable
from blockstore.redis import keys
from blockstore.redis_registry import RedisRegistry
from blockstore.redis_store import RedisStore
from tests.integration.ledger_workers import assert_whole, joined, make_directory
from tests.secret import SECRET
from tests.tls_front import Fronts, fronts
from tests.valkey_topologies import cluster, replicated, sentinel


@pytest.fixture
def tls(tmp_path: Path) -> Iterator[Fronts]:
    with fronts(tmp_path / "tls") as made:
        yield made


async def test_a_sentinels_new_primary_is_reached_by_tls(tls: Fronts, tmp_path: Path) -> None:
    with (
        replicated(tmp_path, fronts=tls) as servers,
        sentinel(tmp_path / "sentinel", servers[0], tls) as url,
    ):
        directory = make_directory(tmp_path)
        async with joined(url, directory, "v", "w") as (v, w):
            await v.allocate("a", 1, 3)
            await w.allocate("b", 2, 2)
            num_encrypted = tls.num_encrypted
            servers[0].kill()
            assert await v.grow("a", 1, 3, 4) == (5,)
            assert servers[1].info()["role"] == "master"
            assert tls.num_encrypted > num_encrypted > 0
            await assert_whole([v, w])


async def test_a_clusters_nodes_are_reached_by_tls(tls: Fronts, tmp_path: Path) -> None:
    """Also the replica that takes the place of a node."""
    with cluster(tmp_path, with_replicas=True, fronts=tls) as nodes:
        directory = make_directory(tmp_path)
        registry = await RedisRegistry.connect(nodes.url, SECRET.registry_key, retry_for_s=20)
        async with joined(nodes.url, directory, "v", "w") as (v, w):
            await v.allocate("a", 1, 3)
            assert await registry.next_arrival() > 0
            num_encrypted = tls.num_encrypted
            node = nodes.owner(keys.pool_tag(directory.pool_id))
            node.kill()
            assert await v.grow("a", 1, 3, 4) == (3,)
            assert nodes.owner(keys.pool_tag(directory.pool_id)) is not node
            assert tls.num_encrypted > num_encrypted > 0
            await assert_whole([v, w])
        await registry.close()


@pytest.mark.parametrize("wrong", ["name", "ca"])
async def test_a_node_with_a_wrong_certificate_is_not_used(
    tls: Fronts, tmp_path: Path, wrong: str
) -> None:
    """A server that stands in for a node has another name, or another CA's certificate."""
    with cluster(tmp_path, fronts=tls) as nodes, fronts(tmp_path / "other") as others:
        url = nodes.url
        if wrong == "name":
            url = url.replace("localhost", "127.0.0.2")
        else:
            url = url.replace(str(tls.ca), str(others.ca))
        with pytest.raises(StoreUnavailable):
            await RedisStore.connect(url)
