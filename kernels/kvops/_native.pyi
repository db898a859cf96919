from typing import Any

import numpy as np
from torch import Tensor

_Array = np.ndarray[Any, np.dtype[Any]]

def usable_kernels() -> list[str]: ...
def emulated_kernels() -> list[str]: ...
def wake(board: Tensor, owner: int) -> None: ...
def packed_bytes(kind: str, n: int, k: int) -> int: ...

class ThreadPool:
    def __init__(self, num_threads: int) -> None: ...
    def assign(self, cpus: list[int], owners: list[list[int]], board: Tensor | None) -> None: ...
    @property
    def num_lanes(self) -> int: ...
    @property
    def num_loops(self) -> int: ...

class PackedLinear:
    def __init__(
        self, kind: str, n: int, k: int, memory: Tensor, bias: Tensor | None = None
    ) -> None: ...

class Experts:
    def __init__(
        self,
        *,
        router: PackedLinear,
        gate_up: list[PackedLinear],
        down: list[PackedLinear],
        top_k: int,
        normalizes: bool,
        alpha: float = 0.0,
        limit: float = 0.0,
    ) -> None: ...

class Ops:
    def __init__(self, isa: str, pool: ThreadPool) -> None: ...
    def linear(
        self, x: Tensor, weights: PackedLinear, out: Tensor, epilogue: str = "store"
    ) -> None: ...
    def attention(
        self,
        q: Tensor,
        kv_layer: Tensor,
        block_tables: Tensor,
        cu_query_lens: Tensor,
        context_lens: Tensor,
        scale: float,
        window: int,
        out: Tensor,
        cap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> None: ...
    def experts(
        self, x: Tensor, weight: Tensor, eps: float, experts: Experts, out: Tensor
    ) -> None: ...
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None: ...
    def qkv(
        self,
        qkv: Tensor,
        query_norm: Tensor | None,
        key_norm: Tensor | None,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        q: Tensor,
        kv_layer: Tensor,
    ) -> None: ...

class Adjustment:
    def __init__(
        self,
        *,
        biased: _Array,
        biases: _Array,
        seen: _Array,
        counts: _Array,
        repetition: float,
        frequency: float,
        presence: float,
        allowed: _Array | None,
        banned: _Array,
    ) -> None: ...

class Draws:
    def __init__(
        self,
        *,
        temperature: _Array,
        least: _Array,
        top_k: _Array,
        top_p: _Array,
        seed: _Array,
        sequence_index: _Array,
        position: _Array,
        adjustments: list[Adjustment | None],
        masks: list[_Array | None],
    ) -> None: ...

def sample(isa: str, logits: Tensor, draws: Draws, tokens: Tensor) -> None: ...
def score(
    isa: str, pool: ThreadPool, logits: Tensor, token_ids: Tensor, logprobs: Tensor, ranks: Tensor
) -> None: ...

class Shape:
    def __init__(
        self,
        *,
        hidden: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        intermediate: int,
        vocab: int,
        eps: float,
        attention_scale: float,
        attention_cap: float,
        embedding_scale: float,
        residual_scale: float,
        norms_all_heads: bool,
        uses_gelu: bool,
    ) -> None: ...

class Layer:
    def __init__(
        self,
        *,
        attention_in: Tensor | None,
        qkv: PackedLinear,
        query_norm: Tensor | None,
        key_norm: Tensor | None,
        output: PackedLinear,
        attention_out: Tensor | None,
        mlp_in: Tensor | None,
        gate_up: PackedLinear | None = None,
        down: PackedLinear | None = None,
        experts: Experts | None = None,
        mlp_out: Tensor | None,
        sinks: Tensor | None = None,
        window: int,
        cos: Tensor | None,
        sin: Tensor | None,
    ) -> None: ...

LowRank = tuple[Tensor, PackedLinear, Tensor]

class Adapter:
    def __init__(self, layers: list[Layer], added: list[list[LowRank | None]]) -> None: ...

class Decoder:
    def __init__(
        self,
        isa: str,
        pool: ThreadPool,
        shape: Shape,
        layers: list[Layer],
        embedding: Tensor,
        final_norm: Tensor,
    ) -> None: ...
    def forward(
        self,
        adapters: list[tuple[Adapter, int, int]],
        token_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        block_tables: Tensor,
        cu_query_lens: Tensor,
        context_lens: Tensor,
        wanted: Tensor,
        kv: Tensor,
        hidden: Tensor,
    ) -> None: ...

class Head:
    def __init__(
        self,
        isa: str,
        pool: ThreadPool,
        weights: PackedLinear,
        factor: float = 1.0,
        cap: float = 0.0,
    ) -> None: ...
    def logits(self, hidden: Tensor, out: Tensor) -> None: ...
    def draw(
        self,
        hidden: Tensor,
        states: Tensor,
        draws: Draws,
        tokens: Tensor,
        scored: Tensor,
        token_ids: Tensor,
        logprobs: Tensor,
        ranks: Tensor,
    ) -> None: ...
