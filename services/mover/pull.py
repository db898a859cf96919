"""One pull: copies KV from another pool into the mover's own.

    source pool                      this mover                            own pool
      claim (or pin a prefix) ◀─────── 1
                                       2 ───────▶ allocate: stamps say "private"
      stamps, then blocks     ◀─────── 3, 4 ─────▶ blocks land
      stamps once more        ◀─────── 5
                                       6 ───────▶ stamps, commit; detach or release
      release                 ◀─────── 7

The stamps decide what came, never the claim: a block counts if its stamp was right before the read
of the block, and is the same after it. Until a read is over, whoever gave it up meanwhile, its
target blocks stay with their holder, because parts of it may still land.

See ADR 162.
"""

import asyncio
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

from blockstore.errors import (
    BlockStoreError,
    MustWait,
    NotHeld,
    OutOfBlocks,
    StaleHolder,
    StoreLost,
    UnknownPool,
    UnknownWorker,
    WorkerFenced,
)
from blockstore.records import Allocation, PrefixHash
from blockstore.store import tenant_of
from services.mover.source import Copies, Side, Source
from services.mover.transport import Area, Transport, TransportError, landed
from services.pool.stamps import Stamps
from services.protocol.block_keys import BlockKeys, Key
from services.protocol.ticket import Ticket
from services.runtime.logging import get_logger

log = get_logger(__name__)

PART_BLOCKS, PART_BYTES = 1024, 64 << 20
"""The most that one read has. So few descriptors are in use at a time, a pull that is given up
waits for one part only, and its time limit does not grow with the prompt."""

_OVER = (StaleHolder, NotHeld, UnknownPool, UnknownWorker, StoreLost)
"""Errors of a release after which this mover holds nothing in the pool any more."""


class PullFailed(Exception):
    """A pull copied nothing, so the request is computed instead. Metrics count the `reason`."""

    def __init__(self, reason: str, text: str = "") -> None:
        super().__init__(f"{reason}: {text}" if text else reason)
        self.reason = reason


@dataclass(slots=True)
class Target(Side):
    """The mover's own pool."""

    stamps: Stamps
    blocks: Any
    """The pool's blocks, prepared for reads."""
    may_write: Callable[[], bool]
    """False once the block manager has given this mover up."""
    end_process: Callable[[str], None]
    """Called when a read does not end."""


class Pull:
    """Copies the KV of one ticket, in a task that `give_up` ends and no cancellation. `timeout_s`
    limits the calls of the stores and each part of a read."""

    def __init__(
        self,
        transport: Transport,
        source: Source,
        target: Target,
        ticket: Ticket,
        timeout_s: float,
        landing_timeout_s: float,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.num_blocks = 0
        self.reading_s = 0.0
        """How long the read of the blocks took."""
        self._transport = transport
        self._source = source
        self._target = target
        self._ticket = ticket
        self._is_prefix = not ticket.sequences[0].block_ids
        self._holder_id = self._further_id("pull") if self._is_prefix else ticket.holder_id
        self._timeout_s = timeout_s
        self._landing_timeout_s = landing_timeout_s
        self._clock = clock
        self._given_up_at = clock() + timeout_s
        self._pin: tuple[str, int] | None = None
        left_out = 0 if self._is_prefix else 1
        self._keys = BlockKeys.of(ticket, target.spec.block_size, num_left_out=left_out)

    def holds(self, side: Side, holder_id: str) -> bool:
        """Whether this pull has that holder in the source or in the own pool."""
        pinned = self._pin is not None and self._pin[0] == holder_id and side is self._source
        return pinned or (side is self._target and self._holder_id == holder_id)

    def reads(self, source: Source) -> bool:
        return source is self._source

    def give_up(self) -> None:
        """End the pull as soon as nothing lands any more."""
        self._given_up_at = min(self._given_up_at, self._clock())

    async def run(self) -> Ticket | None:
        """Return the ticket, detached in the own pool, or None if the prompt's blocks are in its
        prefix cache. Raises PullFailed and errors of the own pool's store."""
        stamping = self._before, self._after = await self._source.stampings.get()
        try:
            self._check()
            sources = await self._pinned()
            return await self._fill(sources) if sources else None
        except (TransportError, UnknownPool, StoreLost) as error:
            self._source.is_broken = True
            raise PullFailed("source_lost", str(error)) from error
        finally:
            await self._unpin()
            self._source.stampings.put_nowait(stamping)

    # 1, 7: the source pool.

    async def _pinned(self) -> dict[Key, int]:
        """Hold blocks of the source pool, and return the block of each key."""
        try:
            return await (self._pin_prefix() if self._is_prefix else self._claim())
        except (StaleHolder, NotHeld, WorkerFenced, UnknownWorker, MustWait, OutOfBlocks) as error:
            raise PullFailed("source_refused", str(error)) from error

    async def _claim(self) -> dict[Key, int]:
        ticket, source = self._ticket, self._source
        tables = [state.block_ids for state in ticket.sequences]
        num_prompt = len(ticket.prompt_token_ids)
        for state in ticket.sequences:
            if state.num_computed_tokens != num_prompt + len(state.token_ids) - 1:
                raise PullFailed("incomplete", f"{state.num_computed_tokens} computed tokens")
        block_ids = tuple(dict.fromkeys(block_id for table in tables for block_id in table))
        claim = await source.store.claim(
            source.spec.pool_id,
            ticket.holder_id,
            ticket.holder_epoch,
            source.member_id,
            block_ids,
        )
        self._pin = ticket.holder_id, claim.epoch
        self._note("claimed")
        return self._keys.blocks(tables)

    async def _pin_prefix(self) -> dict[Key, int]:
        """Pin the prompt's prefix, unless the own pool has as long a prefix already."""
        source, hashes = self._source, self._keys.trunk.hashes
        num_there = await source.store.match(source.spec.pool_id, hashes)
        if num_there <= await self._target.store.match(self._target.spec.pool_id, hashes):
            return {}
        wanted = hashes[:num_there]
        pin = self._further_id("pin")
        order = self._ticket.order
        try:
            found = await source.store.allocate(
                source.spec.pool_id, pin, source.member_id, order, wanted, num_there
            )
        except (MustWait, OutOfBlocks):
            await source.store.withdraw(source.spec.pool_id, pin)
            raise
        self._pin = pin, found.epoch
        self._note("claimed")
        return found.cached(wanted)

    def _further_id(self, kind: str) -> str:
        """The id of another holder for the tenant of the ticket."""
        return f"{tenant_of(self._ticket.holder_id)}/{kind}-{secrets.token_hex(8)}"

    async def _unpin(self) -> None:
        """Release what is held in the source pool. If that fails, its lease ends by itself."""
        pin, self._pin = self._pin, None
        if pin is None:
            return
        try:
            await self._source.store.release(self._source.spec.pool_id, *pin)
        except _OVER:
            pass
        except BlockStoreError as error:
            self._source.is_broken = True
            log.warning("pin_not_released", pool_id=self._source.spec.pool_id, reason=str(error))

    # 2, 6: the own pool.

    async def _fill(self, sources: dict[Key, int]) -> Ticket | None:
        keys, target = self._keys, self._target
        if not self._is_prefix and set(sources) != set(_all_keys(keys)):
            raise PullFailed("incomplete", f"{len(sources)} blocks")
        allocation = await self._allocate(sources)
        held = target.spec.pool_id, self._holder_id, allocation.epoch
        self._note("allocated")
        is_kept = False
        try:
            chains = (tuple(sources), ()) if self._is_prefix else keys.chains
            targets = allocation.cached(*chains)
            if wrong := keys.first_mismatch(target.stamps, targets):
                log.error("kv_corrupt", pool_id=target.spec.pool_id, block_id=targets[wrong])
                await target.store.retract(target.spec.pool_id, targets[wrong], wrong)
                raise PullFailed("own_cache_corrupt")
            new = allocation.block_ids[allocation.num_cached_blocks :]
            missing = (key for key in sources if key not in targets)
            copied = dict(zip(missing, new, strict=True))
            await self._copy(sources, copied)
            self.num_blocks = len(copied)
            await target.store.commit(*held, keys.full_among(copied))
            self._note("committed")
            if self._is_prefix:
                return None
            self._check()
            epoch = await target.store.detach(*held)
            is_kept = True
            return self._moved(targets | copied, epoch)
        finally:
            if not is_kept:
                await self._release(allocation.epoch)

    async def _allocate(self, sources: Mapping[Key, int]) -> Allocation:
        target, pool_id = self._target, self._target.spec.pool_id
        hashes, branches = (tuple(sources), ()) if self._is_prefix else self._keys.chains
        asked = target.member_id, self._ticket.order, hashes, len(sources), branches
        try:
            return await target.store.allocate(pool_id, self._holder_id, *asked)
        except (OutOfBlocks, MustWait) as error:
            await target.store.withdraw(pool_id, self._holder_id)
            raise PullFailed("no_room", str(error)) from error
        except StaleHolder as error:  # the ticket was in this pool before
            raise PullFailed("holder_used", str(error)) from error

    async def release(self, ticket: Ticket) -> None:
        """Release the ticket that `run` returned, unless a worker has claimed it."""
        await self._release(ticket.holder_epoch)

    async def _release(self, epoch: int) -> None:
        with suppress(StaleHolder):
            await self._target.store.release(self._target.spec.pool_id, self._holder_id, epoch)

    def _moved(self, targets: Mapping[Key, int], epoch: int) -> Ticket:
        sequences = (
            replace(state, block_ids=tuple(targets[key] for key in self._keys.keys_of(number)))
            for number, state in enumerate(self._ticket.sequences)
        )
        return replace(
            self._ticket,
            pool_id=self._target.spec.pool_id,
            holder_epoch=epoch,
            sequences=tuple(sequences),
        )

    # 3, 4, 5: the transfers.

    async def _copy(self, sources: Mapping[Key, int], copied: Mapping[Key, int]) -> None:
        """Copy the blocks of `copied` (key -> own block), and complete their stamps."""
        keys, target = self._keys, self._target
        before = await self._read_stamps(self._before, sources.values())
        self._note("stamps_read")
        if keys.first_mismatch(self._before.stamps, sources) or not self._owns_tails(sources):
            raise PullFailed("wrong_stamps", "the source's blocks hold other tokens")
        self._require_may_write()
        items = [sources[key] for key in copied]
        began = self._clock()
        await self._read(Area.BLOCKS, items, target.blocks, tuple(copied.values()))
        self.reading_s = self._clock() - began
        self._note("blocks_read")
        after = await self._read_stamps(self._after, sources.values())
        if before != after:
            raise PullFailed("stamps_changed", "the source's blocks were given to others meanwhile")
        self._require_may_write()
        for span in keys.spans:
            span.stamp(target.stamps, copied)

    def _owns_tails(self, sources: Mapping[Key, int]) -> bool:
        tails = () if self._is_prefix else tuple(self._keys.tails)
        return self._before.stamps.are_written_by(
            [sources[key] for key in tails], self._ticket.holder_id
        )

    async def _read_stamps(self, copies: Copies, block_ids: Iterable[int]) -> list[bytes]:
        """Read the stamps of the source's blocks; returns the records."""
        items = list(block_ids)
        await self._read(Area.STAMPS, items, copies.prepared, items)
        return [copies.stamps.record(block_id) for block_id in items]

    async def _read(
        self, area: Area, items: Sequence[int], target: Any, places: Sequence[int]
    ) -> None:
        """Read part after part."""
        self._check()
        size = PART_BLOCKS
        if area is Area.BLOCKS:
            size = max(1, min(size, PART_BYTES // self._target.spec.block_bytes))
        for begin in range(0, len(items), size):
            part = slice(begin, begin + size)
            transfer = await asyncio.to_thread(
                self._transport.read,
                self._source.memory,
                area,
                items[part],
                target,
                places[part],
            )
            await landed(transfer, self._end_if_late)
            self._check()
            self._given_up_at = self._clock() + self._timeout_s

    async def _end_if_late(self) -> None:
        """A read that does not end ends the process: nobody else can know when its blocks are
        quiet."""
        late_s = self._clock() - self._given_up_at
        if late_s > 0:
            await self._unpin()
        if late_s > self._landing_timeout_s:
            self._target.end_process(f"a read was given up {late_s:.1f} s ago and has no end")

    def _note(self, step: str) -> None:
        log.debug("pull_step", step=step, holder_id=self._holder_id)

    def _check(self) -> None:
        if self._clock() >= self._given_up_at:
            raise PullFailed("given_up")

    def _require_may_write(self) -> None:
        if not self._target.may_write():
            raise PullFailed("fenced", "this mover was given up by its block manager")


def _all_keys(keys: BlockKeys) -> Iterable[PrefixHash]:
    return (key for number in range(len(keys.branches)) for key in keys.keys_of(number))
