"""The primary of a Sentinel service, or of a cluster, is killed while streams run: its replica
takes over, and no token changes."""

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from blockstore.redis import keys
from quire.async_client import AsyncClient
from tests.valkey_topologies import Cluster, TcpValkey, cluster, replicated, sentinel
from tests.waiting import wait_until

from .conftest import Oracle
from .deployment import Deployment, serving
from .quiet import quiet
from .test_redis_lost import GREEDY, LIMIT_S, NUM_TOKENS, PROMPTS, streaming


@pytest.fixture(scope="module")
def expected(oracle: Oracle) -> list[list[int]]:
    return [oracle.greedy(prompt, NUM_TOKENS) for prompt in PROMPTS]


@asynccontextmanager
async def client_of(running: Deployment) -> AsyncIterator[AsyncClient]:
    client = AsyncClient(running.address, operations=running.operations)
    yield client
    await client.close()


def has_moved(nodes: Cluster, key: str, old: TcpValkey) -> bool:
    return nodes.owner(key) is not old


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


async def test_streams_go_on_when_a_sentinel_promotes_a_replica(
    stack: ExitStack, checkpoint: Path, tmp_path: Path, expected: list[list[int]]
) -> None:
    old, new = stack.enter_context(replicated(tmp_path))
    url = stack.enter_context(sentinel(tmp_path / "sentinel", old))
    running = stack.enter_context(serving(checkpoint, tmp_path, "--redis-url", url))
    async with client_of(running) as client:
        async with streaming(client, expected):
            old.kill()
        await quiet(client)
        assert new.info()["role"] == "master"
        completion = await client.complete(PROMPTS[0], GREEDY, timeout_s=LIMIT_S)
        assert list(completion.token_ids) == expected[0]
        assert (completion.usage.num_cached_tokens or 0) >= 32


@pytest.mark.full
async def test_streams_go_on_when_a_node_of_the_cluster_crashes(
    stack: ExitStack, checkpoint: Path, tmp_path: Path, expected: list[list[int]]
) -> None:
    """The node with the pool crashes first, then the node with the registry."""
    nodes: Cluster = stack.enter_context(cluster(tmp_path, with_replicas=True))
    running = stack.enter_context(serving(checkpoint, tmp_path, "--redis-url", nodes.url))
    async with client_of(running) as client:
        (pool,) = await client.pools()
        for key in (keys.pool_tag(pool.pool_id), keys.MEMBERS):
            old = nodes.owner(key)
            async with streaming(client, expected):
                old.kill()
            wait_until(partial(has_moved, nodes, key, old))
            await quiet(client)
            old.start()
