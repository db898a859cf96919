"""A mover copies the part of a block that each tensor-parallel rank has."""

from pathlib import Path
from typing import Any

import pytest

from .conftest import POOL_MEMORY, Oracle
from .quiet import quiet
from .test_hosts import connected, two_hosts
from .test_serving import greedy, prompt


@pytest.mark.parametrize(
    "devices",
    [
        pytest.param(("cpu", "cpu"), id="hosts"),
        pytest.param(
            ("memfd:0,memfd:1", "memfd:2,memfd:3"), id="GPUs of one host", marks=pytest.mark.full
        ),
    ],
)
async def test_a_prompt_computed_by_two_ranks_decodes_in_another_pool(
    valkey_server: Any, checkpoint: Path, tmp_path: Path, oracle: Oracle, devices: tuple[str, str]
) -> None:
    """The last block of a prompt is full, or begun. All ranks need their parts: each has half of
    the heads. Between hosts NIXL copies, and between GPUs (which are memory of the host here) the
    GPUs do."""
    ranks = {"TENSOR_PARALLEL_SIZE": "2"}
    with two_hosts(valkey_server, checkpoint, tmp_path, 2 * POOL_MEMORY, devices, **ranks) as hosts:
        async with connected(hosts[0]) as client:
            workers = await client.workers()
            sizes = [w.engine["tensor_parallel_size"] for w in workers if w.role != "mover"]
            assert sizes == ["2", "2"]
            for length in (16, 100):
                tokens = prompt(length, length)
                completion = await client.complete(tokens, greedy(24), timeout_s=60)
                assert list(completion.token_ids) == oracle.greedy(tokens, 24)
            await quiet(client)
            assert sum(pool.num_blocks > 0 for pool in await client.pools()) == 2
        assert not hosts[1].events("mover", "pull_failed")
