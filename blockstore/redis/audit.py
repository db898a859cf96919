"""Reads a pool's whole ledger from the server and audits it like a ledger in memory.

A small pool is read in one atomic call. A large one is read in pages, so that no call keeps the
server busy for long. If the pool changes between two pages, reading starts again.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from blockstore.memory.blocks import Blocks
from blockstore.memory.holders import Holder
from blockstore.memory.ledger import Ledger
from blockstore.memory.recount import audit, check_conservation
from blockstore.memory.retentions import Entry
from blockstore.memory.waiters import Waiter
from blockstore.records import AuditReport, PoolSpec, PoolStats
from blockstore.redis.replies import shares, text_fields

ATOMIC_LIMIT = 65_536
"""The most blocks of a pool that is read in one call."""

PAGE_LIMITS = {"blocks": 2048, "returned": 8192, "holders": 4, "retentions": 4}
"""The entries of one page, by part; the server needs a few milliseconds for a page."""

WHOLE = ("people", "sizes", "shares")
"""The parts that are always read in one piece."""

EVERYTHING = 2**31
MAX_RESTARTS = 3

ReadParts = Callable[..., Awaitable[list[Any]]]
"""Calls the function `ledger` (functions/70_reading.lua) with part, first, limit, ..."""


class Changed(Exception):
    """The pool changed between two pages."""


@dataclass(slots=True)
class Reading:
    """The ledger as read so far: the answers of each part, page after page."""

    version: int | None = None
    next_unused: int = 0
    recovering: bool = False
    answers: defaultdict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))

    def add(self, parts: Sequence[str], reply: list[Any]) -> None:
        """Add the reply to one call. Raises Changed."""
        version, self.next_unused, recovering, *answers = reply
        self.recovering = recovering == 1
        if self.version not in (None, version):
            raise Changed
        self.version = version
        for part, answer in zip(parts, answers, strict=True):
            self.answers[part].append(answer)


async def audit_pool(
    stats: PoolStats,
    read: ReadParts,
    atomic_limit: int = ATOMIC_LIMIT,
    page_limits: Mapping[str, int] = PAGE_LIMITS,
) -> AuditReport:
    """Audit the pool; `ledger_checked` is False if the pool changed during every attempt."""
    if stats.spec.num_blocks <= atomic_limit:
        return await asyncio.to_thread(_recount, stats.spec, await _read_at_once(read))
    for _ in range(1 + MAX_RESTARTS):
        try:
            reading = await _read_in_pages(read, page_limits)
        except Changed:
            continue
        return await asyncio.to_thread(_recount, stats.spec, reading)
    return counters_only(stats)


async def _read_at_once(read: ReadParts) -> Reading:
    reading, parts = Reading(), (*PAGE_LIMITS, *WHOLE)
    reading.add(parts, await read(*(arg for part in parts for arg in (part, 0, EVERYTHING))))
    return reading


async def _read_in_pages(read: ReadParts, page_limits: Mapping[str, int]) -> Reading:
    """Raises Changed."""
    reading = Reading()
    for part in WHOLE:
        reading.add([part], await read(part, 0, 0))
    for part, limit in page_limits.items():
        first, is_full = 0, True
        while is_full:
            reading.add([part], await read(part, first, limit))
            answer = reading.answers[part][-1]
            is_full = len(answer[0] if part == "blocks" else answer) == limit
            first += limit
    return reading


def _recount(spec: PoolSpec, reading: Reading) -> AuditReport:
    ledger = Ledger(spec, time.monotonic, missing=() if reading.recovering else None)
    ledger.blocks = _blocks(spec.num_blocks, reading)
    for page in reading.answers["holders"]:
        for holder_id, epoch, worker_id, order, _, *block_ids in page:
            holder = Holder(holder_id.decode(), worker_id.decode(), order, 0, epoch=epoch)
            holder.acquire([int(block_id) for block_id in block_ids])
            ledger.holders[holder.holder_id] = holder
    _add_workers(ledger, *reading.answers["people"][0][:4])
    _add_retentions(ledger, reading)
    (now, used, starts, of_tenants), payers = reading.answers["shares"][0]
    ledger.blocks.shares = shares(now, used, starts, text_fields(of_tenants))
    ledger.blocks.payers = {int(block_id): payer.decode() for block_id, payer in _items(payers)}
    report = audit(ledger)
    strays = tuple(_unknown_entries(ledger.blocks, reading.answers["sizes"][0]))
    return replace(report, violations=report.violations + strays)


def _blocks(num_blocks: int, reading: Reading) -> Blocks:
    blocks = Blocks(num_blocks)
    blocks.next_unused = reading.next_unused
    blocks.returned = [int(block_id) for page in reading.answers["returned"] for block_id in page]
    rows = (row for page in reading.answers["blocks"] for row in zip(*page, strict=True))
    for block_id, (refs, prefix_hash, clock, indexed, kept) in enumerate(rows):
        if refs is not None:
            blocks.refs[block_id] = int(refs)
        if clock is not None:
            blocks.cached[block_id] = None
        if kept is not None:
            blocks.kept[block_id] = None
        if prefix_hash is not None:
            blocks.hash_of[block_id] = prefix_hash
        if indexed is not None:
            blocks.index[prefix_hash] = int(indexed)
    return blocks


def _add_workers(
    ledger: Ledger,
    workers: list[bytes],
    waiters: list[bytes],
    waiting: list[bytes],
    demands: list[bytes],
) -> None:
    ledger.workers = {worker.decode(): fenced == b"1" for worker, fenced in _items(workers)}
    worker_of = {holder.decode(): worker.decode() for holder, worker in _items(waiting)}
    for name, order in _items(waiters):
        holder_id = name.decode()
        ledger.waiters[holder_id] = Waiter(int(order), worker_of.get(holder_id, ""))
    ledger.demands = {holder_id.decode() for holder_id in demands}


def _add_retentions(ledger: Ledger, reading: Reading) -> None:
    for page in reading.answers["retentions"]:
        for key, *flat in page:
            owner, name = key.decode().split("/", 1)
            values = dict(_items(flat))
            ledger.retentions[owner, name] = Entry(0.0, tuple(values))
            for prefix_hash, value in values.items():
                count, payer = (value or b"0 ").decode().split(" ", 1)
                ledger.blocks.retained[prefix_hash] = int(count), payer
    charged = _items(reading.answers["people"][0][4])
    ledger.retentions.charged.update({owner.decode(): int(number) for owner, number in charged})


def _items(flat: list[bytes]) -> Iterator[tuple[bytes, bytes]]:
    return zip(flat[::2], flat[1::2], strict=True)


def _unknown_entries(blocks: Blocks, sizes: list[int]) -> Iterator[str]:
    """Report entries that belong to no block in use. Only their number is known: the size of a key
    less the entries found by block."""
    found = {
        "refs": len(blocks.refs),
        "hashes": len(blocks.hash_of),
        "index": len(blocks.index),
        "cached": len(blocks.cached),
        "kept": len(blocks.kept),
        "retained": len(blocks.retained),
        "retained by the header": len(blocks.retained),
    }
    for (name, num_found), size in zip(found.items(), sizes, strict=True):
        if num_found != size:
            yield f"{name} has {size} entries, {num_found} of them of blocks in use"


def counters_only(stats: PoolStats) -> AuditReport:
    violations = () if stats.recovering else tuple(check_conservation(stats))
    return AuditReport.of(stats, 0, False, violations)
