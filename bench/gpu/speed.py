"""How fast attention reads keys and values, beside what the GPU's memory and cores can do."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

import kvops
from bench.gpu.check import Check, Failed, Machine, Passed, Skipped
from bench.gpu.decode import attention_of
from kvops import AttentionShape, Backend
from kvops.step import AttentionStep, page_facts

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
DECODE = ((64, 8192), (256, 2048), (8, 32768))
"""Rows and context; gigabytes of keys and values, so that neither launch nor cache matters."""
SMALL_DECODE = ((1, 1024), (1, 32768), (8, 4096), (64, 1024))
PREFILL = (2048, 8192)
MIN_COPY_SHARE = 0.8
"""Of the bytes per second that a copy within the GPU's memory moves."""
MIN_COPY_SHARE_FP8 = 0.5
"""With keys and values in fp8, of which each has to be converted."""
MIN_FLOP_PER_S = {(9, 0): 320e12}
"""Of prefill with 8,192 tokens by the attention that a worker chooses, by capability."""
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
    figures: dict[str, float | str] = {"copy_bytes_per_s": copied}
    slow = []
    for rows, context in machine.pick((*SMALL_DECODE, *DECODE), ((2, 300),)):
        seconds = machine.seconds(_attention(machine, ops, rows, 1, context, in_fp8))
        share = rows * context * NUM_KV_HEADS * HEAD_DIM * 2 * item_bytes / seconds / copied
        figures[f"{rows} x {context}"] = share
        if (rows, context) in DECODE and share < least:
            slow.append(f"{rows} x {context}")
    shares = (f"{key} {value:.0%}" for key, value in figures.items() if " x " in key)
    text = f"of a copy's {copied / 1e9:,.0f} GB/s, rows x context: {', '.join(shares)}"
    if slow:
        raise Failed(f"{text}; {', '.join(slow)} below {least:.0%}")
    return Passed(text, figures)


def _prefill(machine: Machine, name: str) -> Passed:
    ops, limit = _backend(machine, name), _matmul_rate(machine)
    figures: dict[str, float | str] = {"matmul_flop_per_s": limit}
    for length in machine.pick(PREFILL, (40,)):
        seconds = machine.seconds(_attention(machine, ops, 1, length, length))
        figures[str(length)] = 4 * NUM_HEADS * HEAD_DIM * length * (length + 1) / 2 / seconds
    rates = {key: float(value) for key, value in figures.items() if key.isdigit()}
    text = ", ".join(f"{key} tokens {rate / 1e12:,.0f} TFLOP/s" for key, rate in rates.items())
    text += f"; a matrix product {limit / 1e12:,.0f}"
    if not machine.dry_run and max(rates.values()) < MIN_MATMUL_SHARE * limit:
        raise Failed(f"{text}: less than {MIN_MATMUL_SHARE:.0%} of it")
    wanted = 0.0
    if not machine.dry_run and name == attention_of(_shape(machine, ops)):
        wanted = MIN_FLOP_PER_S.get(torch.cuda.get_device_capability(), 0.0)
    if rates.get("8192", wanted) < wanted:
        raise Failed(f"{text}; wanted {wanted / 1e12:,.0f} TFLOP/s")
    return Passed(text, figures)


def _launch(machine: Machine) -> Passed:
    """The launches of a decode step's attention in one layer: the time that CUDA graphs would save,
    measured without them."""
    ops = kvops.backend("triton")
    seconds = machine.host_seconds(_attention(machine, ops, machine.pick(64, 2), 1, 300))
    return Passed(f"{seconds * 1e6:.0f} us", {"seconds": seconds})


def _attention(
    machine: Machine, ops: Backend, rows: int, new: int, context: int, in_fp8: bool = False
) -> Callable[[], object]:
    """One call over blocks in random order."""
    of_model = _shape(machine, ops, in_fp8)
    block_size = of_model.block_size
    per_row = -(-context // block_size)
    shape = (rows * per_row, 1, 2, block_size, NUM_KV_HEADS, HEAD_DIM)
    arena = torch.randn(shape, device=machine.device, dtype=machine.half).to(of_model.kv_dtype)
    tables = torch.randperm(rows * per_row).int().view(rows, per_row).to(machine.device)
    q = torch.randn((rows * new, NUM_HEADS, HEAD_DIM), device=machine.device, dtype=machine.half)
    begins = torch.arange(0, rows * new + 1, new, dtype=torch.int32, device=machine.device)
    contexts = torch.full((rows,), context, dtype=torch.int32, device=machine.device)
    scale = HEAD_DIM**-0.5
    if ops.needs_plan:
        num_pages, last = page_facts(np.full(rows, context, np.int32), block_size)
        page_begins = np.concatenate([[0], num_pages.cumsum()]).astype(np.int32)
        query_begins = np.arange(0, rows * new + 1, new, dtype=np.int32)
        ids = tables.flatten()
        ops.plan(AttentionStep(of_model, query_begins, page_begins, last, ids))
    return lambda: ops.paged_attention(
        q, arena[:, 0], tables, begins, contexts, scale, max_query_len=new
    )


def _shape(machine: Machine, ops: Backend, in_fp8: bool = False) -> AttentionShape:
    block_size = 256 if ops.name == "flash" else 16
    kv_dtype = torch.float8_e4m3fn if in_fp8 else machine.half
    return AttentionShape(NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, block_size, machine.half, kv_dtype)


def _matmul_rate(machine: Machine) -> float:
    size = machine.pick(8192, 64)
    matrix = torch.randn(size, size, device=machine.device, dtype=machine.half)
    return 2.0 * size**3 / machine.seconds(lambda: matrix @ matrix)
