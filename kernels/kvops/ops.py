"""The operations of every backend, with their shapes and checks.

Letters in shapes: T new tokens of all rows, B rows, H query heads, K key/value heads, D head size.

The arena is `[num_blocks, num_layers, 2, block_size, K, D]`; in the third dimension, index 0 has
the keys and 1 the values. One layer, `kv[:, layer]`, is `[num_blocks, 2, block_size, K, D]`, a
strided view. An arena in int8 has D + 4 bytes for a head, see `kvops.int8_kv`; an arena in fp8 has
e4m3 numbers without a scale, see `kvops.fp8.saturated`. Slot s is at offset s % block_size of block
s // block_size. Slots into which no row was stored may have any content, including NaN; no
operation reads them.

Operations raise ValueError for a wrong shape, dtype or device. They read no values for that check.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvops import int8_kv
from kvops.checks import DTYPES, check_beside, check_index, check_norm, check_rotation, fits, shown
from kvops.draws import DRAW_DTYPES, DrawTensors, PenaltyTables
from kvops.experts import ExpertWeights
from kvops.grouped import GroupedWeight
from kvops.kernels import Kernels
from kvops.step import AttentionCall, AttentionShape, AttentionStep, HeadNorms, HeadsCall

if TYPE_CHECKING:  # the C++ module is absent where Quire is not compiled
    from kvops.native import NativeCpu

_SMALL = {
    torch.int8: ("int8", "'cpu' has"),
    torch.float8_e4m3fn: ("fp8", "'triton' has, and on GPUs attention 'triton' and 'flashinfer'"),
}
"""The dtypes of arenas of eight bits: a name, and the backends that have such arenas."""


class Backend:
    """The operations on one kind of device. The docstring of an operation that writes into an
    argument begins with "Writes".

    All tensors are on `device`, "cpu" or "cuda". `native` are the native kernels, which compute
    whole steps in C++; if it is None, the engine composes steps of these operations. An arena may
    also be of one of the `kv_dtypes`, beside queries of any dtype. `sample` draws tokens where the
    logits are if `has_sampler`, and `add_low_rank` is there if `has_low_rank`. The engine calls
    `plan` before each step if `needs_plan`. Steps of each number of tokens in `linear_rows` take
    other kernels, which are compiled when they are
    first called."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.name, self.device = kernels.name, kernels.device
        self.native: NativeCpu | None = kernels.native
        self.kv_dtypes, self.has_sampler = kernels.kv_dtypes, kernels.has_sampler
        self.needs_plan, self.linear_rows = kernels.needs_plan, kernels.linear_rows
        self.has_low_rank = kernels.has_low_rank

    def describe(self, dtype: torch.dtype) -> dict[str, str]:
        """Return a description of the computation for logs and the registry."""
        num_threads = self.native.num_lanes if self.native else torch.get_num_threads()
        return {**self.numerics(dtype), "threads": str(num_threads)}

    def numerics(self, dtype: torch.dtype) -> dict[str, str]:
        """Return everything that the bits of a result depend on; workers that share a pool must
        have equal values."""
        return {
            "backend": self.name,
            "dtype": str(dtype).removeprefix("torch."),
            "torch": torch.__version__,
            **self._kernels.numerics(),
        }

    def check_attention(self, shape: AttentionShape) -> None:
        """Raises ValueError if this backend cannot compute attention of this shape."""
        shape.check()
        if shape.kv_dtype in _SMALL and shape.kv_dtype not in self.kv_dtypes:
            kind, others = _SMALL[shape.kv_dtype]
            raise ValueError(f"backend {self.name!r} has no KV in {kind}; {others}")
        if shape.has_sinks and not self._kernels.has_sinks:
            raise ValueError(
                f"attention {self.name!r} has no sinks, which this model needs: choose --attention "
                "triton"
            )
        self._kernels.check_attention(shape)

    def plan(self, step: AttentionStep) -> None:
        """Plan the attention of the step that is launched next. In a CUDA graph, a plan changes
        what the graph computes when it is replayed."""
        self._kernels.plan(step)

    def set_max_blocks(self, max_blocks: int) -> None:
        """Set the longest block table of steps in CUDA graphs, before the first graph."""
        self._kernels.max_blocks = max_blocks

    def warm_up(self, kv_layer: Tensor, shape: AttentionShape, max_rows: int) -> None:
        """Compile all variants of attention kernels that depend on a step's number of rows, for
        steps of up to `max_rows` rows. Reads block 0 of `kv_layer`, writes nothing."""
        self._heads(kv_layer)
        self._kernels.warm_up(kv_layer, shape, max_rows)

    def store_kv(self, kv_layer: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        """Writes `kv_layer`: stores token t's key and value in slot `slot_mapping[t]`; -1 skips the
        token.

        k, v: [T, K, D], any strides. slot_mapping: [T], int; no slot twice.
        """
        self.store_heads(kv_layer, k[:, :0], k, v, slot_mapping)

    def store_heads(
        self,
        kv_layer: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slot_mapping: Tensor,
        norms: HeadNorms | None = None,
        rotation: tuple[Tensor, ...] | None = None,
    ) -> Tensor:
        """Writes `kv_layer`, and perhaps `q` and `k`: does `rms_norm` of queries and keys if there
        are `norms`, rotates them if there is a `rotation`, and then does `store_kv`. Result: the
        queries that attention takes, [T, H, D].

        q: [T, H, D], k, v: [T, K, D], any strides. rotation: cos and sin, [T, R / 2], fp32, R at
        most D. The pair (x[i], x[i + R / 2]) of each head turns by the token's i-th angle, in fp32
        (Su et al., 2021; paired by halves as in GPT-NeoX); the dimensions from R on stay as they
        are.
        """
        check_beside("k", k, _beside(kv_layer, k), (-1, *self._heads(kv_layer)))
        check_beside("v", v, k, tuple(k.shape))
        check_index("slot_mapping", slot_mapping, (k.shape[0],))
        check_beside("q", q, k, (k.shape[0], -1, k.shape[2]))
        if rotation is not None:
            check_rotation(q, k, *rotation)
        if norms is not None:
            for x, weight in ((q, norms.query), (k, norms.key)):
                is_whole = len(weight) == x.shape[1] * x.shape[2]
                check_norm(weight, x.flatten(1) if is_whole else x)
        return self._kernels.store_heads(
            HeadsCall(kv_layer, q, k, v, slot_mapping, norms, rotation)
        )

    def clear_begun_blocks(self, kv: Tensor, slot_mapping: Tensor) -> None:
        """Writes `kv` if the kernels read whole blocks: zeroes, in all layers, each block with its
        first slot in `slot_mapping`. A step calls it once, before it stores, so that attention
        reads no rows of the block's last owner, which may be NaN.

        kv: the arena. slot_mapping: [T], int; as for `store_kv`.
        """
        if not fits(kv, (-1, -1, 2, -1, -1, -1)):
            raise ValueError(f"kv: {shown(kv)} is not an arena")
        check_index("slot_mapping", slot_mapping, (-1,))
        if self._kernels.reads_whole_blocks:
            self._kernels.clear_begun_blocks(kv, slot_mapping)

    def paged_attention(
        self,
        q: Tensor,
        kv_layer: Tensor,
        block_tables: Tensor,
        cu_query_lens: Tensor,
        context_lens: Tensor,
        scale: float,
        window: int | None = None,
        *,
        max_query_len: int,
        cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Computes causal attention of each row's new tokens over the row's context, which includes
        the new tokens.

        q: [T, H, D]. Row b's tokens are at `cu_query_lens[b] : cu_query_lens[b + 1]` and at the
        last positions of the row's context, so that query i of n sees
        `context_lens[b] - n + i + 1` positions. With a `window` (>= 1) a query sees the last
        `window` of these, including its own; positions that no query of the row sees may have any
        content, including NaN. Prefill, a chunk and a decode step differ in n alone. Keys and
        values are read from the arena only: store the new ones first. Position p of row b is in
        block `block_tables[b, p // block_size]`; table entries behind the row's context are not
        read. Query head h uses key/value head h // (H / K).

        Scores are the products of queries and keys times `scale`; with a soft cap, `cap` (> 0),
        they become cap * tanh(score / cap) before the softmax. `sinks`: fp32 [H], a further score
        in the softmax of each query of a head, which has no value; on backends with `has_sinks`.

        block_tables: [B, any], cu_query_lens: [B + 1], context_lens: [B], int. scale > 0.
        max_query_len: the most new tokens of a row, known on the host: a launch never waits for the
        device. If it is 1 and T = B, each row has one new token: a decode step. Result: [T, H, D].
        """
        num_kv_heads, head_dim = self._heads(kv_layer)
        check_beside("q", q, _beside(kv_layer, q), (-1, -1, head_dim))
        if q.shape[1] % num_kv_heads:
            raise ValueError(f"{num_kv_heads} kv heads do not divide {q.shape[1]} query heads")
        check_index("context_lens", context_lens, (-1,))
        num_rows = context_lens.shape[0]
        check_index("cu_query_lens", cu_query_lens, (num_rows + 1,))
        check_index("block_tables", block_tables, (num_rows, -1))
        if not scale > 0:
            raise ValueError(f"scale: {scale} is not positive; the largest product scores highest")
        if window is not None and window < 1:
            raise ValueError(f"window: {window} is not positive; a query sees at least itself")
        if cap is not None and not cap > 0:
            raise ValueError(f"cap: {cap} is not positive")
        if sinks is not None:
            if not self._kernels.has_sinks:
                raise ValueError(f"sinks: backend {self.name!r} has no attention sinks")
            if sinks.shape != q.shape[1:2] or sinks.dtype != torch.float32:
                raise ValueError(f"sinks: {shown(sinks)} is not fp32 {[q.shape[1]]}")
        if q.shape[0] > num_rows * max_query_len:
            raise ValueError(
                f"max_query_len: {num_rows} rows of at most {max_query_len} tokens are fewer than "
                f"{q.shape[0]} tokens"
            )
        rows = (block_tables, cu_query_lens, context_lens)
        return self._kernels.paged_attention(
            AttentionCall(q, kv_layer, *rows, scale, window, max_query_len, cap, sinks)
        )

    def copy_blocks(self, kv: Tensor, pairs: Tensor, source: Tensor | None = None) -> None:
        """Writes `kv`: block `pairs[i, 1]` becomes a copy of block `pairs[i, 0]` of `kv`, or of
        `source` if that is given, in all layers.

        kv: the arena, or any tensor whose first dimension is blocks. source: another such tensor
        with blocks of the same shape, on any device. pairs: [any, 2], int; no destination twice.
        All source blocks are read before any destination is written.
        """
        if kv.dim() < 2:
            raise ValueError(f"kv: {shown(kv)} has no blocks in it")
        if source is not None and (source.shape[1:], source.dtype) != (kv.shape[1:], kv.dtype):
            raise ValueError(f"source: {shown(source)} has other blocks than {shown(kv)}")
        check_index("pairs", pairs, (-1, 2))
        self._kernels.copy_blocks(kv, pairs, source)

    def linear(
        self, x: Tensor, weight: Tensor | GroupedWeight, bias: Tensor | None = None
    ) -> Tensor:
        """Computes x [T, in] @ weight [out, in] transposed + bias [out]. Quantized weights are
        rounded to x's dtype, except for the scale of each output. More than 16 rows beside weights
        in fp8 may be rounded to fp8 too (`kvops.fp8.rounded`). Result: [T, out]."""
        if isinstance(weight, GroupedWeight):
            check_beside("x", x, x, (-1, weight.num_inputs))
            if weight.codes.device != x.device:
                raise ValueError(f"weight: on {weight.codes.device}, x on {x.device}")
            num_outputs = len(weight.codes)
        else:
            check_beside("x", x, weight, (-1, weight.shape[-1]))
            check_beside("weight", weight, weight, (-1, -1))
            num_outputs = len(weight)
        if bias is not None:
            check_beside("bias", bias, x, (num_outputs,))
        return self._kernels.linear(x, weight, bias)

    def add_low_rank(
        self, y: Tensor, x: Tensor, tables: Tensor, linear: int, max_rank: int
    ) -> None:
        """Writes `y`: adds B @ (A @ x) of each token's adapter, in x's dtype, as two linears do.

        x: [T, in], rows contiguous. y: [T, out]. tables: [T] int64, for each token the address of
        its adapter's table on the device, or 0 without an adapter. A table is int64
        [linears, 3]: of each linear the addresses of A [rank, in] and B [out, rank], contiguous and
        in x's dtype, and the rank, a multiple of 16 up to `max_rank`, 0 if the adapter does not
        change it. The launches depend on T and `max_rank` alone, as a CUDA graph needs it.
        """
        check_beside("x", x, y, (len(y), -1))
        check_beside("y", y, x, (-1, -1))
        if tables.shape != (len(y),) or tables.dtype != torch.int64:
            raise ValueError(f"tables: {shown(tables)} is not int64 {[len(y)]}")
        self._kernels.add_low_rank(y, x, tables, linear, max_rank)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Computes x / sqrt(mean(x^2) + eps) * weight over the last dimension, in fp32 (Zhang and
        Sennrich, 2019). x: [..., n], weight: [n], of x's dtype or fp32. Result: x's shape."""
        check_norm(weight, x)
        return self._kernels.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Writes `residual`: adds x to it. Result: the rms_norm of the sum. Both are [..., n]."""
        check_beside("residual", residual, x, tuple(x.shape))
        check_norm(weight, x)
        return self._kernels.add_rms_norm(x, residual, weight, eps)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """Computes silu(gate) * up, elementwise (Shazeer, 2020). Both are [T, n], any strides."""
        check_beside("up", up, gate, tuple(gate.shape))
        return self._kernels.silu_mul(gate, up)

    def gelu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """Computes gelu(gate) * up, elementwise, with gelu's approximation by tanh (Hendrycks and
        Gimpel, 2016). Both are [T, n], any strides."""
        check_beside("up", up, gate, tuple(gate.shape))
        return self._kernels.gelu_mul(gate, up)

    def experts(self, x: Tensor, weights: ExpertWeights) -> Tensor:
        """Computes a layer of experts: the sum of the outputs of each row's experts, times their
        weights (Shazeer et al., 2017). The router computes in fp32. x: [T, hidden]. Result:
        x's shape."""
        num, hidden = weights.router.shape
        gate_up, down, width = weights.gate_up, weights.down, weights.width
        check_beside("x", x, x, (-1, hidden))
        for name, one, shape in (
            ("gate_up", gate_up, (num, 2 * width, hidden)),
            ("down", down, (num, hidden, width)),
        ):
            if isinstance(one, GroupedWeight):
                if (len(one.codes), one.num_inputs) != (shape[0] * shape[1], shape[2]):
                    raise ValueError(f"{name}: {shown(one.codes)} is not {list(shape)}")
            else:
                check_beside(name, one, x, shape)
        if weights.router.shape != (num, hidden) or weights.router.dtype != torch.float32:
            raise ValueError(f"router: {shown(weights.router)} is not fp32 {[num, hidden]}")
        if not 1 <= weights.top_k <= num:
            raise ValueError(f"top_k: {weights.top_k} is not between 1 and {num} experts")
        return self._kernels.experts(x, weights)

    def warm_up_sampler(self, vocab_size: int) -> None:
        """Compile the kernels of `sample`, if this backend has it."""
        self._kernels.warm_up_sampler(vocab_size)

    def sample(self, logits: Tensor, draws: DrawTensors, tables: PenaltyTables | None) -> Tensor:
        """Draws tokens as `services.engine.sampling.sampler` does, with random numbers of its own.
        Result: [Q] int64, -1 where the logits are not finite.

        logits: fp32 [states, vocab_size], rows contiguous. `tables` is None if no draw has a slot.
        """
        if logits.dim() != 2 or logits.dtype != torch.float32 or logits.stride(1) != 1:
            raise ValueError(f"logits: {shown(logits)} is not fp32 [states, vocab_size]")
        size = len(draws.state)
        for field, dtype in DRAW_DTYPES.items():
            tensor = getattr(draws, field)
            if tensor.shape != (size,) or tensor.dtype != dtype or tensor.device != logits.device:
                raise ValueError(f"{field}: {shown(tensor)} is not {dtype} [{size}]")
        return self._kernels.sample(logits, draws, tables)

    def _heads(self, kv_layer: Tensor) -> tuple[int, int]:
        """Return the number of heads and the head size of one layer of an arena."""
        is_known = kv_layer.dtype in (*DTYPES, *self.kv_dtypes)
        if not fits(kv_layer, (-1, 2, -1, -1, -1)) or not is_known:
            raise ValueError(
                f"kv_layer: {shown(kv_layer)} is not [num_blocks, 2, block_size, kv_heads, "
                f"head_dim] of a dtype that backend {self.name!r} has"
            )
        num_kv_heads, width = kv_layer.shape[3:]
        has_scale = kv_layer.dtype == torch.int8
        return num_kv_heads, width - int8_kv.SCALE_BYTES if has_scale else width


def _beside(kv_layer: Tensor, x: Tensor) -> Tensor:
    """Return a tensor with the dtype that queries, keys and values must have beside `kv_layer`. An
    arena of eight bits takes any, so then it is `x` itself."""
    if kv_layer.dtype in _SMALL and x.device == kv_layer.device:
        return x
    return kv_layer
