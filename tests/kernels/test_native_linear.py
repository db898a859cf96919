"""The native linears of every instruction set that this CPU has: against fp64 and exact integers,
and bitwise against themselves."""

import math

import pytest
import torch
from torch import Tensor

from kvops.native import Kind, NativeCpu
from services.engine.batch import Draw
from services.engine.models.fused import native_draw
from services.protocol.ticket import SamplingParams
from tests.draws import batch_of

from .test_ops import randn

FP32, BF16 = torch.float32, torch.bfloat16
NAN = float("nan")
FLOATS = pytest.mark.parametrize("kind", ["float32", "bfloat16"])
KINDS = pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4-32", "int4-128"])
ROW_COUNTS = [*range(1, 30), 47, 64, 70]  # more than two tiles of any instruction set


def dtype_of(kind: Kind) -> torch.dtype:
    return BF16 if kind == "bfloat16" else FP32


def linear(
    cpu: NativeCpu,
    kind: Kind,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = FP32,
) -> Tensor:
    """y [M, N], written into the middle of NaN: an element that is missing, or written beside y,
    shows."""
    m, n = len(x), len(weight)
    poisoned = torch.full((m, n + 40), NAN, dtype=out_dtype)
    cpu.ops.linear(x, cpu.pack(kind, weight, bias), poisoned[:, 3 : 3 + n])
    assert poisoned[:, :3].isnan().all()
    assert poisoned[:, 3 + n :].isnan().all()
    return poisoned[:, 3 : 3 + n]


@FLOATS
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (1, 1, 1),
        (1, 96, 512),
        (2, 31, 3),
        (5, 33, 7),
        (13, 100, 130),
        (27, 257, 515),
        (500, 64, 48),
    ],
)
def test_a_linear_is_as_near_as_its_sum_allows(
    cpu: NativeCpu, kind: Kind, m: int, n: int, k: int
) -> None:
    """Products of bf16 are exact in fp32, and every addition is rounded once: |error| is at most K
    * 2^-24 * sum |x| |w|. The memory beside x holds NaN."""
    dtype = dtype_of(kind)
    x = torch.full((m, k + 9), NAN, dtype=dtype)[:, 5 : 5 + k]
    x.copy_(randn(m, k, dtype=dtype))
    weight, bias = randn(n, k, dtype=dtype, seed=1), randn(n, seed=2)
    for b in (None, bias):
        actual = linear(cpu, kind, x, weight, b).double()
        expected = x.double() @ weight.double().T
        size = x.double().abs() @ weight.double().abs().T
        if b is not None:
            expected, size = expected + b.double(), size + b.double().abs()
        assert ((actual - expected).abs() <= (k + 2) * 2.0**-24 * size).all()


@KINDS
def test_a_row_does_not_depend_on_other_rows(cpu: NativeCpu, kind: Kind) -> None:
    """Rows of a batch of 70 have the same bits in every smaller batch, alone, and at another
    place."""
    x, weight = randn(70, 70, dtype=dtype_of(kind)), randn(70, 70, dtype=dtype_of(kind), seed=1)
    bias = randn(70, seed=2)
    together = linear(cpu, kind, x, weight, bias)
    for m in ROW_COUNTS:
        assert torch.equal(linear(cpu, kind, x[:m], weight, bias), together[:m])
        assert torch.equal(linear(cpu, kind, x[70 - m :], weight, bias), together[70 - m :])


@KINDS
def test_a_column_does_not_depend_on_other_columns(cpu: NativeCpu, kind: Kind) -> None:
    """Columns of 300 have the same bits in other panels, and at other places of a panel."""
    x, weight = randn(14, 36, dtype=dtype_of(kind)), randn(300, 36, dtype=dtype_of(kind), seed=1)
    together = linear(cpu, kind, x, weight)
    for begin, end in [(0, 1), (5, 250), (40, 72), (63, 300)]:
        assert torch.equal(linear(cpu, kind, x, weight[begin:end]), together[:, begin:end])


@KINDS
def test_threads_change_nothing(cpu: NativeCpu, kind: Kind) -> None:
    x, weight = randn(30, 64, dtype=dtype_of(kind)), randn(1000, 64, dtype=dtype_of(kind), seed=1)
    two = NativeCpu(2, cpu.isa)
    assert torch.equal(linear(two, kind, x, weight), linear(cpu, kind, x, weight))


@KINDS
def test_bf16_out_is_fp32_out_rounded(cpu: NativeCpu, kind: Kind) -> None:
    x, weight = randn(20, 40, dtype=dtype_of(kind)), randn(50, 40, dtype=dtype_of(kind), seed=1)
    exact = linear(cpu, kind, x, weight)
    assert torch.equal(linear(cpu, kind, x, weight, out_dtype=BF16), exact.to(BF16))


@pytest.mark.parametrize("source", [FP32, BF16])
def test_weights_are_converted_to_their_kind(cpu: NativeCpu, source: torch.dtype) -> None:
    """fp32 weights packed as bf16 are rounded; bf16 weights packed as fp32 are kept. The rows of
    the source may be strided."""
    weight = randn(45, 90, dtype=source)[:, 11:50]
    for kind in ("float32", "bfloat16"):
        x = randn(3, 39, dtype=dtype_of(kind), seed=1)
        converted = weight.to(dtype_of(kind)).contiguous()
        assert torch.equal(linear(cpu, kind, x, weight), linear(cpu, kind, x, converted))


@pytest.mark.parametrize("kind", ["int8", "int4-64"])
@pytest.mark.parametrize("wrong", [NAN, float("inf"), -float("inf")])
def test_a_quantized_weight_that_is_not_finite_changes_its_own_column(
    cpu: NativeCpu, kind: Kind, wrong: float
) -> None:
    weight = randn(40, 200)
    weight[17, 3] = wrong
    y = linear(cpu, kind, randn(5, 200, seed=1), weight)
    assert y[:, 17].isnan().all()
    assert y.isfinite().sum() == 5 * 39


@pytest.mark.parametrize("kind", ["int8", "int4-64"])
def test_a_quantized_activation_that_is_not_finite_changes_its_own_row(
    cpu: NativeCpu, kind: Kind
) -> None:
    x = randn(5, 200, seed=1)
    x[2, 7] = float("inf")
    y = linear(cpu, kind, x, randn(40, 200))
    assert not y[2].isfinite().any()
    assert y.isfinite().sum() == 4 * 40


def likeliest(cpu: NativeCpu, kind: Kind, x: Tensor, weight: Tensor) -> list[int]:
    """The column of the largest output of each row, without the outputs in memory."""
    params = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, max_tokens=1)
    batch = batch_of([Draw(params, 0)] * len(x), [0] * len(x))
    head = cpu.head(cpu.pack(kind, weight))
    (tokens,) = native_draw(head, x.float(), batch, [None] * len(x), len(weight))
    return tokens.tolist()


@FLOATS
@pytest.mark.parametrize("num_threads", [1, 2])
def test_the_largest_column_is_found(cpu: NativeCpu, kind: Kind, num_threads: int) -> None:
    """Of equal ones the first is chosen, and padding columns (zeros in a panel) are never
    chosen."""
    dtype = dtype_of(kind)
    threads = NativeCpu(num_threads, cpu.isa)
    x = randn(19, 24, dtype=dtype).abs()
    weight = randn(1001, 24, dtype=dtype, seed=1)
    weight[[5, 9, 40, 700, 1000]] = 2.5  # the largest, in one panel twice
    for w in (weight, weight[6:], weight[:39], -weight.abs(), -weight.abs()[:1]):
        logits = linear(cpu, kind, x, w)
        assert likeliest(threads, kind, x, w) == logits.argmax(1).tolist()


@FLOATS
def test_nan_is_larger_than_anything(cpu: NativeCpu, kind: Kind) -> None:
    """A row with a NaN, with an infinity as its largest, or of -inf has no likeliest column."""
    x = torch.ones(3, 8, dtype=dtype_of(kind))
    weight = randn(600, 8, dtype=dtype_of(kind))
    assert likeliest(cpu, kind, x, weight) == linear(cpu, kind, x, weight).argmax(1).tolist()
    for value in (NAN, float("inf")):
        for column in (0, 300, 599):
            one = weight.clone()
            one[column] = value
            assert likeliest(cpu, kind, x, one) == [-1] * 3
    assert likeliest(cpu, kind, x, torch.full_like(weight, -float("inf"))) == [-1] * 3


@KINDS
def test_the_sum_is_added_to_what_is_there(cpu: NativeCpu, kind: Kind) -> None:
    x, weight = randn(17, 40, dtype=dtype_of(kind)), randn(75, 40, dtype=dtype_of(kind), seed=1)
    residual, bias = randn(17, 75, seed=2), randn(75, seed=3)
    out = residual.clone()
    cpu.ops.linear(x, cpu.pack(kind, weight, bias), out, "add")
    assert torch.equal(out, residual + linear(cpu, kind, x, weight, bias))


@KINDS
@pytest.mark.parametrize("out_dtype", [FP32, BF16])
@pytest.mark.parametrize("epilogue", ["silu_mul", "gelu_mul"])
def test_the_gate_is_applied_to_what_it_gates(
    cpu: NativeCpu, kind: Kind, out_dtype: torch.dtype, epilogue: str
) -> None:
    """A panel is 16 columns of the gate and the same 16 of `up`. silu is within 4 ulp, also where
    e^x would overflow, and falls smoothly to 0. gelu is as near to x * logistic(2 y); it falls to 0
    faster, so an error of its exponent has more effect."""
    x = randn(25, 40, dtype=dtype_of(kind)) * torch.logspace(-3, 2, 25)[:, None].to(dtype_of(kind))
    weight = randn(96, 40, dtype=dtype_of(kind), seed=1)
    y = linear(cpu, kind, x, weight).view(25, 3, 2, 16).double()
    gate, inner = y[:, :, 0], y[:, :, 0]
    if epilogue == "gelu_mul":
        inner = 2 * math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    expected = (gate * torch.sigmoid(inner) * y[:, :, 1]).reshape(25, 48)
    out = torch.full((25, 60), NAN, dtype=out_dtype)
    cpu.ops.linear(x, cpu.pack(kind, weight), out[:, 5:53], epilogue)
    assert out.isnan().sum() == 25 * 12
    rounding = 2.0**-8 if out_dtype == BF16 else 2.0**-20
    if epilogue == "gelu_mul":
        rounding += 2.0**-22 * float(inner.clamp(-90, 0).abs().max())
    error = (out[:, 5:53].double() - expected).abs()
    assert (error <= rounding * expected.abs() + 1e-30).all()


@pytest.mark.parametrize("epilogue", ["silu_mul", "gelu_mul"])
def test_a_gate_is_clamped_to_its_limits(cpu: NativeCpu, epilogue: str) -> None:
    """Gates of 0, large gates, and infinite gates; NaN stays NaN."""
    gate = torch.tensor([0.0, 1e4, -1e4, float("inf"), NAN])
    weight = torch.zeros(32, 1)
    weight[0], weight[16] = 1.0, 0.0
    packed = cpu.pack("float32", weight, torch.ones(32) * (torch.arange(32) >= 16))
    out = torch.empty(5, 16)
    cpu.ops.linear(gate[:, None], packed, out, epilogue)
    assert out[:3, 0].tolist() == [0.0, 1e4, 0.0]
    assert out[4].isnan().sum() == 16
