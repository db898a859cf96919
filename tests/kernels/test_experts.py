"""Layers of experts: the native kernels of every instruction set equal the reference and their own
linears, and a row's bits do not depend on the batch."""

import pytest
import torch
from torch import Tensor

import kvops
from bench.gpu.experts import randn, weights_of
from kvops.experts import ExpertWeights
from kvops.native import Experts, Kind, NativeCpu, PackedLinear
from kvops.quantized import joined

EPS = 1e-6
NAN = float("nan")
KINDS: tuple[Kind, ...] = ("float32", "bfloat16", "int8", "int4-32")
TOLERANCES = {"float32": 1e-5, "bfloat16": 0.02, "int8": 0.05, "int4-32": 0.3}


def matrices(weights: ExpertWeights) -> tuple[Tensor, Tensor]:
    """`gate_up` and `down`, which are not quantized."""
    assert isinstance(weights.gate_up, Tensor)
    assert isinstance(weights.down, Tensor)
    return weights.gate_up, weights.down


def packed_gate_up(
    cpu: NativeCpu, kind: Kind, gate_up: Tensor, bias: Tensor | None = None
) -> PackedLinear:
    wide_bias = None if bias is None else joined(bias.chunk(2), 16)
    return cpu.pack(kind, joined(gate_up.chunk(2), 16), wide_bias)


def of(biases: Tensor | None, expert: int) -> Tensor | None:
    return None if biases is None else biases[expert]


def native(cpu: NativeCpu, kind: Kind, weights: ExpertWeights) -> Experts:
    return Experts(
        router=cpu.pack("float32", weights.router, weights.router_bias),
        gate_up=[
            packed_gate_up(cpu, kind, expert, of(weights.gate_up_bias, i))
            for i, expert in enumerate(matrices(weights)[0])
        ],
        down=[
            cpu.pack(kind, expert, of(weights.down_bias, i))
            for i, expert in enumerate(matrices(weights)[1])
        ],
        top_k=weights.top_k,
        normalizes=weights.normalizes,
        alpha=weights.alpha,
        limit=weights.limit,
    )


def compute(cpu: NativeCpu, experts: Experts, x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    cpu.ops.experts(x, torch.ones(x.shape[1]), EPS, experts, out)
    return out


def normed(cpu: NativeCpu, x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    cpu.ops.rms_norm(x, torch.ones(x.shape[1]), EPS, out)
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("num", "top_k", "normalizes", "swiglu"),
    [
        *((1, 1, True, False), (8, 2, True, False), (8, 8, False, False), (130, 2, False, False)),
        (8, 3, True, True),
    ],
)
def test_native_experts_are_near_the_reference(
    cpu: NativeCpu, kind: Kind, num: int, top_k: int, normalizes: bool, swiglu: bool
) -> None:
    weights, x = weights_of(num, top_k, normalizes=normalizes, swiglu=swiglu), randn(37, 64)
    actual = compute(cpu, native(cpu, kind, weights), x)
    expected = kvops.backend("reference").experts(normed(cpu, x), weights)
    assert (actual - expected).abs().max() <= TOLERANCES[kind] * expected.abs().max()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wide", [40, 33])
def test_a_row_does_not_depend_on_other_rows(cpu: NativeCpu, kind: Kind, wide: int) -> None:
    """A row of a batch of 50 has the same bits alone, in other batches, and on two threads."""
    weights, x = weights_of(7, 3, wide=wide, swiglu=wide == 33), randn(50, 64)
    experts = native(cpu, kind, weights)
    together = compute(cpu, experts, x)
    assert together.isfinite().all()
    for rows in ([0], [49], [3, 17], list(range(49, -1, -1)), list(range(11, 40))):
        assert torch.equal(compute(cpu, experts, x[rows]), together[rows])
    two = NativeCpu(2, cpu.isa)
    assert torch.equal(compute(two, experts, x), together)


@pytest.mark.parametrize("kind", ["float32", "int8", "int4-32"])
def test_experts_have_the_bits_of_their_linears(cpu: NativeCpu, kind: Kind) -> None:
    """With one expert a row, of weight 1, the output is that of the expert's two linears."""
    weights, x = weights_of(5, 1), randn(30, 64)
    logits, hidden = torch.empty(30, 5), normed(cpu, x)
    cpu.ops.linear(hidden, cpu.pack("float32", weights.router), logits)
    expected = torch.empty_like(x)
    gated_type = torch.float32 if kind == "float32" else torch.bfloat16
    for row, expert in enumerate(logits.argmax(dim=1).tolist()):
        gated = torch.empty(1, 48, dtype=gated_type)
        gate_up = packed_gate_up(cpu, kind, matrices(weights)[0][expert])
        cpu.ops.linear(hidden[row : row + 1], gate_up, gated, "silu_mul")
        down = cpu.pack(kind, matrices(weights)[1][expert])
        cpu.ops.linear(gated[:, :40].contiguous(), down, expected[row : row + 1])
    assert torch.equal(compute(cpu, native(cpu, kind, weights), x), expected)


@pytest.mark.parametrize("levels", [1, 2, 5])
@pytest.mark.parametrize(
    ("num", "top_k"), [(8, 2), (16, 4), (128, 1), (128, 2), (128, 8), (130, 2)]
)
def test_equal_logits_are_chosen_as_by_transformers(num: int, top_k: int, levels: int) -> None:
    """transformers calls torch.topk. Expert e writes only column e, so that the output shows the
    choice."""
    cpu, hidden = NativeCpu(), 132
    weights = weights_of(num, top_k, hidden)
    for expert in range(num):
        matrices(weights)[1][expert].zero_()[expert] = 1
    generator = torch.Generator().manual_seed(levels)
    weights.router.zero_()[:, 0] = torch.randint(levels, (num,), generator=generator)
    x = randn(64, hidden).abs() + 0.1
    out = compute(cpu, native(cpu, "float32", weights), x)[:, :num]
    chosen, _ = weights.choose(normed(cpu, x) @ weights.router.T)
    expected = torch.zeros(64, num, dtype=torch.bool).scatter_(1, chosen, True)
    assert torch.equal(out != 0, expected)


def test_a_row_that_is_not_finite_changes_no_other_row(cpu: NativeCpu) -> None:
    x = randn(6, 64)
    experts = native(cpu, "float32", weights_of(6, 2))
    expected = compute(cpu, experts, x)
    x[2, 5] = NAN
    actual = compute(cpu, experts, x)
    assert actual[2].isnan().all()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(actual[others], expected[others])


def test_experts_that_do_not_fit_are_refused(cpu: NativeCpu) -> None:
    weights = weights_of(4, 2)
    packed = [packed_gate_up(cpu, "float32", expert) for expert in matrices(weights)[0]]
    down = [cpu.pack("float32", expert) for expert in matrices(weights)[1]]
    router = cpu.pack("float32", weights.router)
    for top_k, some in ((0, down), (5, down), (2, down[:3]), (2, [*down[:3], router])):
        with pytest.raises(ValueError, match=r"top_k|router|experts"):
            Experts(router=router, gate_up=packed, down=some, top_k=top_k, normalizes=True)


def test_experts_of_backends_are_checked() -> None:
    backend, weights = kvops.backend("reference"), weights_of(4, 2)
    with pytest.raises(ValueError, match="x: "):
        backend.experts(randn(3, 63), weights)
    gate_up, down = matrices(weights)
    one = ExpertWeights(weights.router[:1], gate_up[:1], down[:1], 2, True)
    with pytest.raises(ValueError, match="top_k: 2 is not between 1 and 1 experts"):
        backend.experts(randn(3, 64), one)
