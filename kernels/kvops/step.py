"""The arguments of attention: the shape of a model's attention, which decides at start who can
compute it; the lengths of a step's rows, from which a step is planned on the host; and the
arguments of one layer's call."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Ints = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The shape of a model's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype  # of queries
    kv_dtype: torch.dtype  # of the arena
    windows: tuple[int | None, ...] = (None,)
    """The windows of the layers, each once; None sees all positions."""
    scale: float | None = None
    """The factor of the scores; None is 1 / sqrt(head_dim)."""
    cap: float | None = None
    """The soft cap of the scores, if they have one."""
    has_sinks: bool = False
    """Whether the softmax has one more score for each head."""

    @classmethod
    def of_call(cls, call: "AttentionCall") -> "AttentionShape":
        q, kv_layer = call.q, call.kv_layer
        block_size, num_kv_heads = kv_layer.shape[2:4]
        return cls(
            q.shape[1], num_kv_heads, q.shape[2], block_size, q.dtype, kv_layer.dtype, cap=call.cap
        )

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    def check(self) -> None:
        """Raises ValueError if no attention has this shape."""
        if not self.num_kv_heads or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} query heads are no multiple of {self.num_kv_heads} key/value "
                "heads"
            )


class HeadNorms(NamedTuple):
    """The weights of the norms of queries and keys, as wide as a head or as all heads of a
    token."""

    query: Tensor
    key: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class HeadsCall:
    """The arguments of `kvops.ops.Backend.store_heads`, which has checked them."""

    kv_layer: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    slot_mapping: Tensor
    norms: HeadNorms | None
    rotation: tuple[Tensor, ...] | None


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The arguments of `kvops.ops.Backend.paged_attention`, which has checked them."""

    q: Tensor
    kv_layer: Tensor
    block_tables: Tensor
    cu_query_lens: Tensor
    context_lens: Tensor
    scale: float
    window: int | None
    max_query_len: int
    cap: float | None = None
    sinks: Tensor | None = None

    @property
    def is_decode(self) -> bool:
        """Whether each row has one token, known on the host."""
        return self.max_query_len == 1 and len(self.q) == len(self.context_lens)

    @property
    def longest_context(self) -> int:
        """A bound of the rows' contexts, known on the host."""
        return self.block_tables.shape[1] * self.kv_layer.shape[2]


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """The rows of a step. A padded row has no context, but one page with one position, for kernels
    that divide by the sum of a row's weights."""

    shape: AttentionShape
    query_begins: Ints  # [B + 1]
    page_begins: Ints  # [B + 1]
    last_page_lens: Ints
    """[B], the number of positions in each row's last page."""
    page_ids: Tensor
    """The rows' pages, one row after the other, on the device."""
    graph_query_len: int | None = None
    """The most tokens of a row in the CUDA graph that replays the step, for steps of as many rows
    and tokens; None if the step is launched kernel by kernel."""


def page_facts(context_lens: Ints, block_size: int) -> tuple[Ints, Ints]:
    """The number of pages of each row, at least 1, and the positions in the last one."""
    lens = np.maximum(context_lens, 1)
    num_pages = -(-lens // block_size)
    return num_pages.astype(np.int32), (lens - (num_pages - 1) * block_size).astype(np.int32)
