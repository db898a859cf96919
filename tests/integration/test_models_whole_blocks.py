"""Kernels that read whole blocks: values of a block's last owner do not reach a later sequence."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import kvops
from bench.make_checkpoint import make_checkpoint
from kvops.ops import Backend
from kvops.reference import ReferenceKernels
from kvops.step import AttentionCall
from services.engine.batch import Draw, Fault, Row, RowResult
from services.engine.models import load_model
from services.engine.runner import Runner

from .models_oracle import GREEDY

BLOCK_SIZE = 8


class WholeBlockKernels(ReferenceKernels):
    """Attention with weight 0 for the slots of its blocks that a row does not see, as in kernels
    for newer GPUs. 0 x NaN is NaN."""

    reads_whole_blocks = True

    def paged_attention(self, call: AttentionCall) -> Tensor:
        out = super().paged_attention(call)
        for row, context_len in enumerate(call.context_lens.tolist()):
            num_blocks = -(-context_len // BLOCK_SIZE)
            values = call.kv_layer[call.block_tables[row, :num_blocks].long(), 1].flatten(0, 1)
            unseen = (values[context_len:] * 0).sum()
            out[call.cu_query_lens[row] : call.cu_query_lens[row + 1]] += unseen
        return out


class UnclearedKernels(WholeBlockKernels):
    def clear_begun_blocks(self, kv: Tensor, slot_mapping: Tensor) -> None:
        return


def generate(ops: Backend, directory: Path, content: float) -> list[RowResult]:
    """Two sequences in blocks with this content: prompts in chunks, then tokens over two blocks.
    The second sequence has copies of the first one's blocks, as after a fork."""
    model = load_model(directory, torch.float32, ops)
    config = model.config
    shape = (9, config.num_layers, 2, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    runner = Runner(model, torch.full(shape, content), BLOCK_SIZE, ops)
    prompt, blocks = list(range(20, 31)), ([4, 1, 7], [2, 8, 0])
    results: list[RowResult] = []

    def compute(number: int, tokens: list[int], start: int) -> list[int]:
        draws = (Draw(GREEDY.sampling, number),)
        (result,) = runner.launch([Row(tokens, start, blocks[number], 0, draws)]).result()
        results.append(result)
        return list(result) if isinstance(result, tuple) else [0]

    compute(0, prompt[:5], 0)
    first = compute(0, prompt[5:], 5)
    runner.launch([], list(zip(blocks[0][:2], blocks[1][:2], strict=True)))
    second = [17]
    for position in range(len(prompt), 2 * BLOCK_SIZE + 3):
        first = compute(0, first, position)
        second = compute(1, second, position)
    return results


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("whole_blocks"))


def test_nan_in_the_blocks_of_a_broken_group_reaches_no_later_sequence(checkpoint: Path) -> None:
    expected = generate(kvops.backend("reference"), checkpoint, 0.0)
    assert Fault.NOT_FINITE not in expected
    assert generate(Backend(WholeBlockKernels()), checkpoint, float("nan")) == expected


def test_without_clearing_it_does(checkpoint: Path) -> None:
    """This shows that the test above can fail."""
    assert Fault.NOT_FINITE in generate(Backend(UnclearedKernels()), checkpoint, float("nan"))
