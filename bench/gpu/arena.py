"""The pool's arena on the GPU: zeroes, stores, copies, forks, swaps, files."""

import time
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from bench.gpu.check import Check, Failed, Machine, Passed, compare, same_bits, worst
from bench.gpu.paged import PagedBatch, attend
from services.engine.pool import KVPool
from services.pool.layout import PoolLayout
from services.worker.file_cache.pool_blocks import pool_blocks

NUM_LAYERS, NUM_KV_HEADS, NUM_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 4, 8, 64, 16
MIN_SWAP_BYTES_PER_S = 4e9
"""Less than a third of PCIe 3: below it, the copies wait for something."""


def checks(machine: Machine) -> Iterator[Check]:
    yield "a new arena is zero", lambda: _is_zero(machine)
    yield "stores write their slots and nothing else", lambda: _stores(machine)
    yield "begun blocks are cleared", lambda: _clears(machine)
    yield "copies read every source first", lambda: _copies(machine)
    yield "a fork continues in a copy of its block", lambda: _forks(machine)
    yield "blocks swapped to the host and back", lambda: _swaps(machine)
    yield "blocks through the buffer of a file cache", lambda: _files(machine)
    yield "swapping beside a step", lambda: _swap_speed(machine)


def _arena(machine: Machine, num_blocks: int, num_layers: int = NUM_LAYERS) -> Tensor:
    layout = PoolLayout(
        model="check",
        fingerprint="",
        num_layers=num_layers,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        dtype="float32" if machine.dry_run else "bfloat16",
        block_size=BLOCK_SIZE,
    )
    return KVPool.private(layout, num_blocks, machine.device).kv


def _random(arena: Tensor, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(arena.shape, generator=draw).to(arena.dtype)


def _is_zero(machine: Machine) -> Passed:
    """In memory that had NaN before."""
    num_blocks = machine.pick(4096, 8)
    used = _arena(machine, num_blocks).fill_(float("nan"))
    del used
    if _arena(machine, num_blocks).any():
        raise Failed("a new arena has values other than zero")
    return Passed(f"{num_blocks} blocks")


def _stores(machine: Machine) -> Passed:
    num_tokens, num_blocks = machine.pick(1000, 40), machine.pick(128, 8)
    draw = torch.Generator().manual_seed(1)
    slots = torch.randperm(num_blocks * BLOCK_SIZE, generator=draw)[:num_tokens].clone()
    slots[2::3] = -1
    arena = _arena(machine, num_blocks).fill_(float("nan"))
    fused = torch.randn(num_tokens, 2 * NUM_KV_HEADS, HEAD_DIM, generator=draw).to(arena)
    key, value = fused[:, :NUM_KV_HEADS], fused[:, NUM_KV_HEADS:]
    machine.ops.store_kv(arena[:, 1], key, value, slots.to(machine.device))
    expected = torch.full_like(arena, float("nan"), device="cpu")
    machine.reference.store_kv(expected[:, 1], key.cpu(), value.cpu(), slots)
    same_bits(arena.cpu().nan_to_num(77.0), expected.nan_to_num(77.0), "the arena")
    return Passed(f"{num_tokens} tokens, a third without a slot")


def _clears(machine: Machine) -> Passed:
    """The kernel that backends whose kernels read whole blocks call before they store."""
    from kvops.triton.fusions import clear_begun_blocks

    arena = _arena(machine, 8).fill_(float("nan"))
    slots = torch.tensor([BLOCK_SIZE, -1, 4 * BLOCK_SIZE, 3 * BLOCK_SIZE - 1])
    clear_begun_blocks(arena, slots.to(machine.device))
    cleared = [block for block in range(8) if not arena[block].any()]
    kept = [block for block in range(8) if arena[block].isnan().all()]
    if (cleared, kept) != ([1, 4], [0, 2, 3, 5, 6, 7]):
        raise Failed(f"cleared {cleared} instead of 1 and 4, kept {kept}")
    return Passed("2 of 8 blocks")


def _copies(machine: Machine) -> Passed:
    """Blocks 0 and 1 change places, 3 goes to 2 and 4."""
    arena = _arena(machine, 6)
    before = arena.copy_(_random(arena)).clone()
    pairs = torch.tensor([[0, 1], [1, 0], [3, 2], [3, 4]], device=machine.device)
    machine.ops.copy_blocks(arena, pairs)
    same_bits(arena, before[[1, 0, 3, 3, 3, 5]], "the arena")
    return Passed("4 copies")


def _forks(machine: Machine) -> Passed:
    """Two sequences share block 3. One gets a copy, 5, and both write their next slot."""
    ops, arena = machine.ops, _arena(machine, 6)
    arena.copy_(_random(arena))
    length = BLOCK_SIZE + 5
    ops.copy_blocks(arena, torch.tensor([[3, 5]], device=machine.device))
    draw = torch.Generator().manual_seed(2)
    new = torch.randn(2, 2, NUM_KV_HEADS, HEAD_DIM, generator=draw).to(arena)
    slots = torch.tensor([block * BLOCK_SIZE + 5 for block in (3, 5)], device=machine.device)
    ops.store_kv(arena[:, 2], new[:, 0], new[:, 1], slots)
    q = torch.randn(2, NUM_HEADS, HEAD_DIM, generator=draw).to(arena)
    tables, begins = torch.tensor([[1, 3], [1, 5]]), torch.tensor([0, 1, 2])
    contexts = torch.tensor([length + 1] * 2)
    batch = PagedBatch(q.cpu(), arena[:, 2].cpu(), tables, begins, contexts, [], [])
    found, expected = attend(ops, machine.moved(batch)), attend(machine.reference, batch)
    same_bits(arena[3, :2], arena[5, :2], "the layers that nobody wrote")
    return worst([compare(found, expected)], "batch")


def _swaps(machine: Machine) -> Passed:
    """More blocks than the two staging buffers hold, in random order."""
    ops, arena = machine.ops, _arena(machine, machine.pick(2048, 16))
    before = arena.copy_(_random(arena)).clone()
    host = torch.zeros(arena.shape, dtype=arena.dtype)
    order = torch.randperm(len(arena), generator=torch.Generator().manual_seed(3))
    there = torch.stack([order, torch.arange(len(arena))], dim=1)
    ops.copy_blocks(host, there, arena)
    arena.fill_(float("nan"))
    ops.copy_blocks(arena, there.flip(1), host)
    same_bits(arena, before, "the arena after a round trip")
    return Passed(f"{len(arena)} blocks, {arena.nbytes / 1e6:.0f} MB")


def _files(machine: Machine) -> Passed:
    """Each block's bytes become the block after it."""
    arena = _arena(machine, 8)
    before = arena.copy_(_random(arena)).clone()
    blocks = pool_blocks(arena)
    for block_id in range(8):
        content = bytes(blocks.content(block_id))
        if content != before[block_id].cpu().view(-1).view(torch.uint8).numpy().tobytes():
            raise Failed(f"the bytes of block {block_id} differ")
    for block_id in range(7, 0, -1):
        content = bytes(blocks.content(block_id - 1))
        blocks.fill(block_id, partial(_write, content))
    same_bits(arena, before[[0, 0, 1, 2, 3, 4, 5, 6]], "the arena")
    return Passed("8 blocks")


def _write(content: bytes, target: memoryview) -> bool:
    target[:] = content
    return True


def _swap_speed(machine: Machine) -> Passed:
    """Bytes per second of copies, while the GPU multiplies matrices for longer than they take.
    Blocks of a megabyte, as of a model of billions: the host handles each by itself."""
    ops, arena = machine.ops, _arena(machine, *machine.pick((512, 64), (8, NUM_LAYERS)))
    size = machine.pick(8192, 8)
    host = torch.zeros(arena.shape, dtype=arena.dtype)
    pairs = torch.arange(len(arena)).repeat(2, 1).T
    matrix = torch.zeros(size, size, dtype=machine.half, device=machine.device)
    rates: dict[str, float] = {}
    for name, target, source in (("to the host", host, arena), ("back", arena, host)):
        ops.copy_blocks(target, pairs, source)
        machine.synchronize()
        for _ in range(machine.pick(300, 1)):
            torch.mm(matrix, matrix)
        began = time.perf_counter()
        ops.copy_blocks(target, pairs, source)
        rates[name] = arena.nbytes / (time.perf_counter() - began)
        machine.synchronize()
    text = ", ".join(f"{rate / 1e9:.1f} GB/s {name}" for name, rate in rates.items())
    figures = {f"bytes_per_s {name}": rate for name, rate in rates.items()}
    is_fast = min(rates.values()) >= MIN_SWAP_BYTES_PER_S
    return machine.judge(is_fast, f"{MIN_SWAP_BYTES_PER_S / 1e9:.0f} GB/s", text, figures)
