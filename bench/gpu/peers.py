"""Blocks of one GPU's arena that another GPU copies into its own, as a mover does between pools. A
dry run has memory of the host in the place of both."""

import os
import time
from collections.abc import Iterator

import torch

import kvops.cuda
from bench.gpu.check import Check, Failed, Machine, Passed, Skipped
from kvops.cuda.vmm import DriverError, SharedMemory

_BLOCK_BYTES = 2 << 20


def checks(machine: Machine) -> Iterator[Check]:
    yield "blocks copied from another GPU", lambda: _copied(machine)


def _copied(machine: Machine) -> Passed:
    if not machine.dry_run and (count := torch.cuda.device_count()) < 2:
        raise Skipped(f"runs only with two GPUs; here is {count}")
    names = machine.pick(("cuda:0", "cuda:1"), ("memfd:0", "memfd:1"))
    num_blocks = machine.pick(512, 4)
    try:
        theirs, own = [kvops.cuda.driver(name) for name in names]
    except kvops.BackendUnavailable as error:
        raise Skipped(f"runs only with cuda-bindings: {error}") from error
    source, target = [
        SharedMemory.create(driver, num_blocks * _BLOCK_BYTES) for driver in (theirs, own)
    ]
    values = source.tensor().view(num_blocks, _BLOCK_BYTES)
    values.copy_(torch.arange(num_blocks, dtype=torch.uint8)[:, None].expand_as(values))
    if values.is_cuda:
        torch.cuda.synchronize(values.device)
    try:
        read = SharedMemory.open(own, os.dup(source.fd), source.num_bytes, writable=False)
    except DriverError as error:
        raise Skipped(f"runs only where GPUs reach each other: {error}") from error
    queue, began = own.copies(), time.perf_counter()
    order = torch.randperm(num_blocks).tolist()
    for place, block in enumerate(order):
        begins = target.pointer + place * _BLOCK_BYTES, read.pointer + block * _BLOCK_BYTES
        queue.copy(*begins, _BLOCK_BYTES)
    is_done = queue.mark()
    while not is_done():
        pass
    seconds = time.perf_counter() - began
    found = target.tensor().view(num_blocks, _BLOCK_BYTES).cpu()
    wanted = torch.tensor(order, dtype=torch.int64).to(torch.uint8)[:, None]
    if wrong := int((found != wanted).any(1).sum()):
        raise Failed(f"{wrong} of {num_blocks} blocks have other bytes")
    for memory in (read, source, target):
        memory.close()
    rate = num_blocks * _BLOCK_BYTES / seconds / 1e9
    return Passed(f"{num_blocks} blocks at {rate:.1f} GB/s", {"gb_per_s": rate})
