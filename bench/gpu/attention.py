"""Attention against the reference on the CPU, bits in different batches, and NaN beside rows."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

import kvops
from bench.gpu.check import Check, Machine, Passed, Skipped, compare, same_bits, worst
from bench.gpu.paged import Geometry, PagedBatch, attend, fill_nan, paged_batch, step_of
from kvops import AttentionShape, Backend, fp8

Rows = list[tuple[int, int]]

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
GEOMETRIES = [
    Geometry(16, num_heads=32, num_kv_heads=8, head_dim=128, dtype=BF16),
    Geometry(16, num_heads=14, num_kv_heads=2, head_dim=64, dtype=BF16),
    Geometry(256, num_heads=16, num_kv_heads=8, head_dim=128, dtype=FP16),
    Geometry(32, num_heads=8, num_kv_heads=8, head_dim=96, dtype=BF16),
    Geometry(64, num_heads=8, num_kv_heads=1, head_dim=256, dtype=BF16),
    Geometry(16, num_heads=4, num_kv_heads=2, head_dim=64, dtype=FP32),
]
ROWS: list[Rows] = [
    [(1, 1)],
    [(1, 1), (1, 256), (1, 257), (1, 3000)],
    [(1, 9000), (1, 3)],
    [(64, 64), (130, 130), (1, 1), (257, 300)],
    [(1, 77), (40, 40), (0, 20), (5, 900)],
]
TINY_GEOMETRIES = [
    Geometry(16, num_heads=4, num_kv_heads=2, head_dim=16, dtype=FP16),
    Geometry(4, num_heads=2, num_kv_heads=1, head_dim=24, dtype=FP32),
]
TINY_ROWS: list[Rows] = [[(1, 1)], [(1, 20), (1, 300)], [(9, 9), (3, 33)]]
FLASHINFER = Geometry(16, num_heads=16, num_kv_heads=4, head_dim=128, dtype=BF16)
FLASH = Geometry(256, num_heads=16, num_kv_heads=4, head_dim=128, dtype=BF16)


def checks(machine: Machine) -> Iterator[Check]:
    for geometry in machine.pick(GEOMETRIES, TINY_GEOMETRIES):
        dtype = str(geometry.dtype).removeprefix("torch.")
        name = (
            f"{dtype}, {geometry.num_heads}/{geometry.num_kv_heads} heads of {geometry.head_dim}, "
            f"blocks of {geometry.block_size}"
        )
        yield f"equals the reference, {name}", partial(equals_reference, machine, geometry)
        yield f"same bits in every batch, {name}", partial(invariance, machine, geometry)
    yield "NaN beside rows, whole blocks", lambda: _beside_nan(machine)
    yield "contexts of 0 beside others", lambda: _without_context(machine)
    yield "sinks", lambda: _sinks(machine)
    yield "flash equals the reference", lambda: _flash(machine)
    yield "keys and values in fp8", lambda: _in_fp8(machine)
    yield "flashinfer equals the reference", lambda: _flashinfer(machine, FLASHINFER)
    in_fp8 = replace(FLASHINFER, in_fp8=True)
    yield "flashinfer in fp8", lambda: _flashinfer(machine, in_fp8)
    yield "flashinfer in several runs", lambda: _several_runs(machine)


def _error(machine: Machine, batch: PagedBatch, window: int | None = None) -> float:
    """The largest error, as a share of what is allowed."""
    found = attend(machine.ops, machine.moved(batch), window)
    return compare(found, attend(machine.reference, batch, window))


def equals_reference(machine: Machine, geometry: Geometry) -> Passed:
    """All positions that no query sees are NaN."""
    return worst(
        (
            _error(machine, paged_batch(geometry, rows, len(rows), window), window)
            for rows in machine.pick(ROWS, TINY_ROWS)
            for window in (None, 40)
        ),
        "batches",
    )


def invariance(machine: Machine, geometry: Geometry) -> Passed:
    """Each row alone and among others; and the same call twice. A decode step and a prefill."""
    ops = machine.ops
    decode = [
        (1, context) for context in machine.pick([1, 200, 256, 257, 700, 2000, 5000], [1, 300])
    ]
    prefill = machine.pick([(100, 100), (33, 70), (64, 64), (300, 900)], [(9, 9), (3, 33)])
    for rows in (decode * machine.pick(8, 1), prefill):
        batch = machine.moved(paged_batch(geometry, rows, seed=3))
        together = attend(ops, batch)
        same_bits(attend(ops, batch), together, "the same call again")
        begins = batch.cu_query_lens.tolist()
        for row, (new, _) in enumerate(rows):
            same = together[begins[row] : begins[row + 1]]
            same_bits(attend(ops, batch.row(row)), same, f"row {row} of {new} tokens alone")
    return Passed(f"{len(decode) * machine.pick(8, 1)} decoding rows and {len(prefill)} prompts")


def _beside_nan(machine: Machine) -> Passed:
    """Rows that fill a few slots of blocks of 256, whose other slots are NaN."""
    geometry = Geometry(256, num_heads=8, num_kv_heads=2, head_dim=64, dtype=machine.half)
    batches = ([(1, 1), (1, 257), (1, 511)], [(5, 5), (3, 258)])
    return worst((_error(machine, paged_batch(geometry, rows, 5)) for rows in batches), "batches")


def _without_context(machine: Machine) -> Passed:
    """The padded rows of CUDA graphs: with and without splits."""
    geometry = Geometry(16, num_heads=8, num_kv_heads=2, head_dim=64, dtype=machine.half)
    batches = [paged_batch(geometry, [(1, 1), (1, context)], seed=6) for context in (20, 600)]
    for batch in batches:
        batch.context_lens[0] = 0
    return worst((_error(machine, batch) for batch in batches), "steps")


def _sinks(machine: Machine) -> Passed:
    """gpt-oss: 8 query heads for each KV head, and a window in every second layer."""
    geometry = Geometry(16, num_heads=16, num_kv_heads=2, head_dim=64, dtype=machine.half)
    sinks, shares = torch.linspace(-3, 3, 16), []
    for rows in machine.pick(ROWS, TINY_ROWS):
        for window in (None, 128):
            batch = paged_batch(geometry, rows, seed=len(rows), window=window)
            there = machine.moved(batch)
            found = attend(machine.ops, there, window, sinks=sinks.to(machine.device))
            shares.append(compare(found, attend(machine.reference, batch, window, sinks=sinks)))
    return worst(shares, "batches")


def _in_fp8(machine: Machine) -> Passed:
    """The bytes that are stored, also of numbers that are too large, and attention."""
    geometry = Geometry(16, 16, 4, head_dim=machine.pick(128, 16), dtype=machine.half, in_fp8=True)
    heads = fp8_numbers(geometry.head_dim).to(machine.half).to(machine.device)
    slots = torch.arange(len(heads), device=machine.device)
    shape = (len(heads) // 16, 2, 16, 4, geometry.head_dim)
    arena = torch.zeros(shape, dtype=geometry.kv_dtype, device=machine.device)
    machine.ops.store_kv(arena, heads, heads, slots)
    expected = fp8.saturated(heads.cpu()).view(torch.uint8)
    for half in (0, 1):
        found = arena.cpu().view(torch.uint8)[:, half].flatten(0, 1)
        same_bits(found, expected, "stored heads")
    machine.ops.store_heads(arena.fill_(0), heads.repeat(1, 4, 1), heads, heads, slots)
    found = arena.cpu().view(torch.uint8)[:, 0].flatten(0, 1)
    same_bits(found, expected, "heads stored with queries")
    return equals_reference(machine, geometry)


def fp8_numbers(head_dim: int) -> torch.Tensor:
    """Heads [tokens, 4, head_dim] of all sizes that e4m3 has, and beyond: fp32."""
    sizes = torch.exp2(torch.linspace(-12, 12, 64 * 4 * head_dim))
    draw = torch.Generator().manual_seed(1)
    numbers = sizes * torch.randn(sizes.shape, generator=draw).sign()
    numbers[:3] = torch.tensor([float("nan"), float("inf"), 0.0])
    return numbers.view(64, 4, head_dim)


def _planning(geometry: Geometry) -> tuple[Backend, AttentionShape]:
    shape = AttentionShape(16, 4, 128, geometry.block_size, BF16, geometry.kv_dtype)
    try:
        ops = kvops.backend("flashinfer")
        ops.check_attention(shape)
    except (kvops.BackendUnavailable, ValueError) as error:
        raise Skipped(str(error)) from error
    return ops, shape


def _planned(
    machine: Machine, ops: Backend, shape: AttentionShape, batch: PagedBatch
) -> PagedBatch:
    """The batch on the device, without NaN, after its step is planned."""
    there = machine.moved(batch)
    fill_nan(there.kv_layer, 1.0)
    ops.plan(step_of(batch, shape, machine.device))
    return there


def _flashinfer(machine: Machine, geometry: Geometry) -> Passed:
    ops, shape = _planning(geometry)
    shares = []
    for rows in ROWS:
        batch = paged_batch(geometry, rows, seed=len(rows))
        found = attend(ops, _planned(machine, ops, shape, batch))
        shares.append(compare(found, attend(machine.reference, batch)))
    return worst(shares, "batches")


def _several_runs(machine: Machine) -> Passed:
    """A decode step whose partial results exceed the workspace: 600 rows that share 30,000
    positions. Its last rows have the bits of a step of their own."""
    ops, shape = _planning(FLASHINFER)
    long = paged_batch(FLASHINFER, [(1, 30_000)], seed=1)
    num_rows, few = 600, 3

    def step(count: int) -> PagedBatch:
        draw = torch.Generator().manual_seed(count)
        return replace(
            long,
            q=torch.randn((count, 16, 128), generator=draw).to(BF16),
            block_tables=long.block_tables.expand(count, -1).contiguous(),
            cu_query_lens=torch.arange(count + 1, dtype=torch.int32),
            context_lens=long.context_lens.expand(count).contiguous(),
        )

    many, alone = step(num_rows), step(few)
    many.q[-few:] = alone.q
    together = attend(ops, _planned(machine, ops, shape, many))
    same_bits(attend(ops, _planned(machine, ops, shape, alone)), together[-few:], "last rows")
    return Passed(f"{num_rows} rows of 30,000 positions")


def _flash(machine: Machine) -> Passed:
    """A version that reads whole blocks needs finite ones; a window does in all versions."""
    try:
        flash = kvops.backend("flash")
    except kvops.BackendUnavailable as error:
        raise Skipped(str(error)) from error
    shares, reads_nan = [], False
    for rows in (*ROWS, [(1, 600)] * 20):
        for window in (None, 40):
            batch = paged_batch(FLASH, rows, seed=len(rows), window=window)
            there = machine.moved(batch)
            reads_nan |= window is None and bool(attend(flash, there).isnan().any())
            there.kv_layer.nan_to_num_(1.0)
            expected = attend(machine.reference, batch, window)
            shares.append(compare(attend(flash, there, window), expected))
    return worst(shares, f"batches, {'reads' if reads_nan else 'skips'} unseen slots")
