"""Random paged batches for the tests of attention: an arena full of NaN, into which only the
contexts of the batch are written: of each, what its queries see."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvops import AttentionShape, Backend, fp8, int8_kv
from kvops.step import AttentionStep, page_facts


@dataclass(frozen=True, slots=True)
class Geometry:
    block_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.float32
    in_int8: bool = False  # keys and values
    in_fp8: bool = False

    @property
    def kv_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.in_fp8 else torch.int8 if self.in_int8 else self.dtype


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """`keys`, `values`: per row the whole context [context, K, D], as it lies in the arena, or as
    its bytes in int8 mean it."""

    q: Tensor
    kv_layer: Tensor
    block_tables: Tensor
    cu_query_lens: Tensor
    context_lens: Tensor
    keys: list[Tensor]
    values: list[Tensor]

    @property
    def max_query_len(self) -> int:
        return int(self.cu_query_lens.diff().max())

    def row(self, number: int) -> "PagedBatch":
        """The batch of one row alone, with no more of its block table than it needs."""
        begin, end = self.cu_query_lens[number : number + 2].tolist()
        num_blocks = -(-int(self.context_lens[number]) // self.kv_layer.shape[2])
        return replace(
            self,
            q=self.q[begin:end],
            block_tables=self.block_tables[number : number + 1, :num_blocks],
            cu_query_lens=self.cu_query_lens[number : number + 2] - begin,
            context_lens=self.context_lens[number : number + 1],
            keys=self.keys[number : number + 1],
            values=self.values[number : number + 1],
        )


def attend(
    ops: Backend,
    batch: PagedBatch,
    window: int | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
    max_query_len: int | None = None,
) -> Tensor:
    """Attention of the batch. Without `max_query_len`, a batch on a GPU is asked for it."""
    return ops.paged_attention(
        batch.q,
        batch.kv_layer,
        batch.block_tables,
        batch.cu_query_lens,
        batch.context_lens,
        batch.q.shape[-1] ** -0.5,
        window,
        max_query_len=max_query_len or batch.max_query_len,
        cap=cap,
        sinks=sinks,
    )


def paged_batch(
    geometry: Geometry, rows: Sequence[tuple[int, int]], seed: int, window: int | None = None
) -> PagedBatch:
    """`rows`: (new tokens, context with them). Blocks lie scattered in layer 1 of three; tables are
    padded with an id that no arena has. With a `window`, what is before it stays NaN."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-context // geometry.block_size) for _, context in rows]
    num_blocks = sum(needed) + 3
    shape = (num_blocks, 3, 2, geometry.block_size, geometry.num_kv_heads, geometry.head_dim)
    arena = stored(torch.full(shape, float("nan"), dtype=geometry.dtype), geometry.kv_dtype)
    free = torch.randperm(num_blocks, generator=generator).tolist()
    tables = torch.full((len(rows), max(needed)), num_blocks + 1000, dtype=torch.int32)
    keys, values = [], []
    for row, (new, context) in enumerate(rows):
        blocks = [free.pop() for _ in range(needed[row])]
        tables[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        kv = _randn((2, context, geometry.num_kv_heads, geometry.head_dim), geometry, generator)
        first = 0 if window is None else max(0, context - new + 1 - window)
        for position in range(first, context):
            block, offset = divmod(position, geometry.block_size)
            arena[blocks[block], 1, :, offset] = stored(kv[:, position], geometry.kv_dtype)
        if geometry.in_int8:
            kv = int8_kv.dequantize(int8_kv.quantize(kv))
        elif geometry.in_fp8:
            kv = fp8.saturated(kv).float()
        keys.append(kv[0])
        values.append(kv[1])
    lens = torch.tensor([0, *(new for new, _ in rows)], dtype=torch.int32)
    num_tokens = int(lens.sum())
    return PagedBatch(
        q=_randn((num_tokens, geometry.num_heads, geometry.head_dim), geometry, generator),
        kv_layer=arena[:, 1],
        block_tables=tables,
        cu_query_lens=lens.cumsum(0, dtype=torch.int32),
        context_lens=torch.tensor([context for _, context in rows], dtype=torch.int32),
        keys=keys,
        values=values,
    )


def step_of(batch: PagedBatch, shape: AttentionShape, device: str) -> AttentionStep:
    """The step of the batch, as kernels that plan get it."""
    num_pages, last = page_facts(batch.context_lens.numpy(force=True), shape.block_size)
    tables = batch.block_tables.numpy(force=True)
    ids = torch.from_numpy(tables[np.arange(tables.shape[1]) < num_pages[:, None]])
    page_begins = np.concatenate([[0], num_pages.cumsum()]).astype(np.int32)
    query_begins = batch.cu_query_lens.numpy(force=True)
    return AttentionStep(shape, query_begins, page_begins, last, ids.to(device))


def stored(heads: Tensor, kv_dtype: torch.dtype) -> Tensor:
    """Heads as an arena has them."""
    if kv_dtype == torch.float8_e4m3fn:
        return fp8.saturated(heads)
    return int8_kv.quantize(heads) if kv_dtype == torch.int8 else heads


def fill_nan(kv_layer: Tensor, value: float) -> None:
    """Puts a number in the place of each NaN."""
    kv_layer.copy_(kv_layer.float().nan_to_num_(value).to(kv_layer.dtype))


def corrupt(batch: PagedBatch, block: Tensor, offset: int) -> None:
    """Makes the keys and values of a slot NaN."""
    slot = batch.kv_layer[block, :, offset]
    heads = torch.full((*slot.shape[:-1], batch.q.shape[-1]), float("nan"))
    batch.kv_layer[block, :, offset] = stored(heads, batch.kv_layer.dtype).to(batch.kv_layer.dtype)


def _randn(shape: tuple[int, ...], geometry: Geometry, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator).to(geometry.dtype)
