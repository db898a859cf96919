"""An arena of a single process; tests/integration/pool/test_pool_memory.py tests the shared one."""

from dataclasses import replace

import pytest
import torch

from services.engine.pool import KVPool
from services.pool.layout import PoolLayout
from services.runtime.errors import StartupError

LAYOUT = PoolLayout(
    model="tiny",
    fingerprint="f",
    num_layers=2,
    num_kv_heads=3,
    head_dim=5,
    dtype="bfloat16",
    block_size=4,
)


def test_a_private_arena_has_the_shape_of_a_shared_one_and_is_empty() -> None:
    pool = KVPool.private(LAYOUT, 7, "cpu")
    assert pool.kv.shape == (7, 2, 2, 4, 3, 5)
    assert pool.kv.dtype == torch.bfloat16
    assert pool.kv.nbytes == 7 * LAYOUT.block_bytes
    assert pool.kv.count_nonzero() == 0
    pool.kv[3] = 1.5
    assert pool.kv[3].eq(1.5).all()


def test_a_closed_private_arena_is_gone() -> None:
    pool = KVPool.private(replace(LAYOUT, dtype="float32"), 7, "cpu")
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match="the pool is closed"):
        _ = pool.kv


def test_more_memory_than_there_is_is_refused_with_the_size() -> None:
    with pytest.raises(StartupError, match=r"cannot have 480\.00 TiB \(.*\) on cpu: "):
        KVPool.private(LAYOUT, 1 << 40, "cpu")


def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(StartupError, match=r"no pool on cuda: PyTorch .* sees no GPU"):
        KVPool.private(LAYOUT, 7, "cuda")
