"""The KV of blocks as bytes of the host, of a pool there and of one on a stand-in for a GPU."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.worker.file_cache.block_files import BadFile, BlockFiles, BlockName
from services.worker.file_cache.pool_blocks import GpuBlocks, HostBlocks, PoolBlocks
from tests.late_stream import LateStream

NAME = BlockName(b"h" * 16, b"p" * 16, [1, 2, 3, 4], 0)


@pytest.fixture(params=["host", "GPU"])
def pool(request: pytest.FixtureRequest) -> tuple[PoolBlocks, Tensor]:
    kv = torch.randn(3, 2, 2, 4, 1, 8).bfloat16()
    return (HostBlocks(kv) if request.param == "host" else GpuBlocks(kv, LateStream())), kv


def test_block_goes_through_a_file_to_another_block(
    pool: tuple[PoolBlocks, Tensor], tmp_path: Path
) -> None:
    blocks, kv = pool
    before = kv.clone()
    files = BlockFiles(tmp_path, "f" * 32, "prefill-1", 1 << 20, 1)
    assert files.write(NAME, blocks.content(1), lambda: True)
    blocks.content(0)  # the next block has the buffer
    assert blocks.fill(2, lambda target: files.read(NAME, target))
    assert torch.equal(kv, before[[0, 1, 1]])


def test_damaged_file_leaves_a_block_on_a_gpu_as_it_was(tmp_path: Path) -> None:
    kv = torch.randn(2, 2, 2, 4, 1, 8)
    before = kv.clone()
    blocks = GpuBlocks(kv, LateStream())
    files = BlockFiles(tmp_path, "f" * 32, "prefill-1", 1 << 20, 1)
    files.write(NAME, blocks.content(0), lambda: True)
    path = tmp_path / ("f" * 32) / NAME.prefix_hash.hex()
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(BadFile):
        blocks.fill(1, lambda target: files.read(NAME, target))
    assert not blocks.fill(1, lambda target: files.read(NAME, target))  # it is removed
    assert torch.equal(kv, before)
