"""Copies between a GPU and the host, on a stand-in for a CUDA stream."""

import pytest
import torch

from kvops.copying import StagedCopies
from tests.late_stream import LateStream

PAIRS = [(5, 0), (1, 4), (2, 5), (0, 2), (7, 7), (3, 1), (4, 3)]
BLOCK = (2, 2, 4, 1, 8)
BLOCK_BYTES = 2 * 2 * 4 * 8 * 4


@pytest.mark.parametrize("num_pairs", [0, 1, 2, 4, 7])
@pytest.mark.parametrize("fitting", [0.5, 1, 2, 100])
@pytest.mark.parametrize("direction", ["to_host", "to_gpu"])
def test_all_blocks_have_arrived_when_the_call_returns(
    direction: str, fitting: float, num_pairs: int
) -> None:
    """A buffer holds less than a block (then it gets the size of one), one, two or all blocks. A
    second call reuses the buffers."""
    stream = LateStream()
    copies = StagedCopies(stream, int(fitting * BLOCK_BYTES))
    pairs = torch.tensor(PAIRS[:num_pairs], dtype=torch.int64).view(-1, 2)
    for seed in (1, 2):
        source = torch.randn(8, *BLOCK, generator=torch.Generator().manual_seed(seed))
        target = torch.zeros(9, *BLOCK)
        getattr(copies, direction)(target, source, pairs)
        expected = torch.zeros(9, *BLOCK)
        for first, to in PAIRS[:num_pairs]:
            expected[to] = source[first]
        assert torch.equal(target, expected)
        assert stream.is_idle
    assert len(stream.buffers) == 2


@pytest.mark.parametrize("direction", ["to_host", "to_gpu"])
def test_two_buffers_are_under_way_at_once(direction: str) -> None:
    stream = LateStream()
    arena = torch.randn(8, *BLOCK)
    getattr(StagedCopies(stream, 2 * BLOCK_BYTES), direction)(
        arena.clone(), arena, torch.tensor(PAIRS)
    )
    assert stream.most_queued == 4
