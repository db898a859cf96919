"""How fast attention reads keys and values, beside what the GPU's memory and cores can do."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

import kvops
from bench.gpu.check import Check, Machine, Passed, Skipped
from bench.gpu.decode import attention_of
from bench.gpu.paged import PagedBatch, attend, step_of
from kvops import AttentionShape, Backend

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
DECODE = ((64, 8192), (256, 2048), (8, 32768))
"""Rows and context; gigabytes of keys and values, so that neither launch nor cache matters."""
SMALL_DECODE = ((1, 1024), (1, 32768), (8, 4096), (64, 1024))
PREFILL = (2048, 8192)
MIN_COPY_SHARE = 0.8
"""Of the bytes per second that a copy within the GPU's memory moves."""
MIN_COPY_SHARE_FP8 = 0.5
"""With keys and values in fp8, of which each has to be converted."""
MIN_FLOP_PER_S = 320e12
"""Of prefill with 8,192 tokens by the attention that a worker chooses, on Hopper."""
MIN_MATMUL_SHARE = 0.25
"""Of the arithmetic per second of a large matrix product in bf16: half of what FlashAttention 2
reaches. Below it a kernel waits for memory."""


def checks(machine: Machine) -> Iterator[Check]:
    for name in ("triton", "flash", "flashinfer"):
        yield f"decode, {name}", partial(_decode, machine, name)
        if name != "flash":
            yield f"decode in fp8, {name}", partial(_decode, machine, name, in_fp8=True)
        yield f"prefill, {name}", partial(_prefill, machine, name)
    yield "host time of a launch, triton", lambda: _launch(machine)


def _backend(machine: Machine, name: str, in_fp8: bool = False) -> Backend:
    try:
        ops = kvops.backend(name)
        ops.check_attention(_shape(machine, ops, in_fp8))
    except (kvops.BackendUnavailable, ValueError) as error:
        raise Skipped(str(error)) from error
    return ops


def _decode(machine: Machine, name: str, in_fp8: bool = False) -> Passed:
    ops, copied = _backend(machine, name, in_fp8), machine.copy_rate()
    item_bytes, least = (1, MIN_COPY_SHARE_FP8) if in_fp8 else (2, MIN_COPY_SHARE)
    shares = {}
    for rows, context in machine.pick((*SMALL_DECODE, *DECODE), ((2, 300),)):
        seconds = machine.seconds(_attention(machine, ops, rows, 1, context, in_fp8))
        num_bytes = rows * context * NUM_KV_HEADS * HEAD_DIM * 2 * item_bytes
        shares[rows, context] = num_bytes / seconds / copied
    figures = {f"{rows} x {context}": share for (rows, context), share in shares.items()}
    text = ", ".join(f"{name} {share:.0%}" for name, share in figures.items())
    text = f"of a copy's {copied / 1e9:,.0f} GB/s, rows x context: {text}"
    is_fast = all(shares.get(size, least) >= least for size in DECODE)
    wanted = f"{least:.0%} of {', '.join(f'{rows} x {context}' for rows, context in DECODE)}"
    return machine.judge(is_fast, wanted, text, {"copy_bytes_per_s": copied, **figures})


def _prefill(machine: Machine, name: str) -> Passed:
    ops, limit = _backend(machine, name), _matmul_rate(machine)
    rates = {}
    for length in machine.pick(PREFILL, (40,)):
        seconds = machine.seconds(_attention(machine, ops, 1, length, length))
        rates[length] = 4 * NUM_HEADS * HEAD_DIM * length * (length + 1) / 2 / seconds
    text = ", ".join(f"{key} tokens {rate / 1e12:,.0f} TFLOP/s" for key, rate in rates.items())
    text += f"; a matrix product {limit / 1e12:,.0f}"
    is_chosen = machine.is_hopper and name == attention_of(_shape(machine, ops))
    least = MIN_FLOP_PER_S if is_chosen else 0.0
    is_fast = max(rates.values()) >= MIN_MATMUL_SHARE * limit and rates.get(8192, least) >= least
    wanted = f"{MIN_MATMUL_SHARE:.0%} of it, and {least / 1e12:,.0f} TFLOP/s"
    figures = {"matmul_flop_per_s": limit, **{str(key): rate for key, rate in rates.items()}}
    return machine.judge(is_fast, wanted, text, figures)


def _launch(machine: Machine) -> Passed:
    """The launches of a decode step's attention in one layer: the time that CUDA graphs would save,
    measured without them."""
    call = _attention(machine, machine.ops, machine.pick(64, 2), 1, 300)
    seconds = machine.host_seconds(call)
    return Passed(f"{seconds * 1e6:.0f} us", {"seconds": seconds})


def _attention(
    machine: Machine, ops: Backend, rows: int, new: int, context: int, in_fp8: bool = False
) -> Callable[[], object]:
    """One call over blocks in random order."""
    of_model, device = _shape(machine, ops, in_fp8), machine.device
    per_row = -(-context // of_model.block_size)
    shape = (rows * per_row, 1, 2, of_model.block_size, NUM_KV_HEADS, HEAD_DIM)
    arena = torch.randn(shape, device=device, dtype=machine.half).to(of_model.kv_dtype)
    batch = PagedBatch(
        q=torch.randn((rows * new, NUM_HEADS, HEAD_DIM), device=device, dtype=machine.half),
        kv_layer=arena[:, 0],
        block_tables=torch.randperm(rows * per_row).int().view(rows, per_row).to(device),
        cu_query_lens=torch.arange(0, rows * new + 1, new, dtype=torch.int32, device=device),
        context_lens=torch.full((rows,), context, dtype=torch.int32, device=device),
        keys=[],
        values=[],
    )
    if ops.needs_plan:
        ops.plan(step_of(batch, of_model, device))
    return partial(attend, ops, batch, max_query_len=new)


def _shape(machine: Machine, ops: Backend, in_fp8: bool = False) -> AttentionShape:
    block_size = 256 if ops.name == "flash" else 16
    kv_dtype = torch.float8_e4m3fn if in_fp8 else machine.half
    return AttentionShape(NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, block_size, machine.half, kv_dtype)


def _matmul_rate(machine: Machine) -> float:
    size = machine.pick(8192, 64)
    matrix = torch.randn(size, size, device=machine.device, dtype=machine.half)
    return 2.0 * size**3 / machine.seconds(lambda: matrix @ matrix)
