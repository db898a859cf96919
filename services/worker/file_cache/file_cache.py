"""A tier below the pool: blocks that prompts ask for again are kept in files.

    asked    a prompt names a block for the second time: its KV is worth a file
    keep     a thread writes the blocks of such prompts, once they are committed in the pool
    fetch    a prompt's blocks that the pool has no more are read into its new blocks

A file is one more copy of a block. Nothing waits for its writing, and nothing is lost with it. The
writing thread holds no blocks: it takes what it has read of the pool only if the block's stamp
is the same before and after, because a block's stamp is reset before its KV is overwritten (law 6).
"""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue

from blockstore.records import Allocation, PrefixHash
from services.pool.stamps import Stamps, StampState
from services.protocol.block_keys import BlockKeys, BlockSpan
from services.protocol.ticket import Ticket
from services.runtime.logging import get_logger
from services.runtime.metrics import WorkerMetrics
from services.worker.file_cache.block_files import BadFile, BlockFiles, BlockName
from services.worker.file_cache.pool_blocks import PoolBlocks
from services.worker.swap.pool import Fetched

_MAX_ASKED = 1 << 18
"""The most blocks that are remembered as asked for: about 30 MiB."""

_MAX_WAITING = 4096
"""The most blocks that wait to be written; further ones are not kept."""

_KEEP_AGAIN_S = 60.0
"""How long a block that was kept is not kept again, nor its use noted."""

_PAUSE_S = 30.0
"""How long nothing is written after an error, such as a full disk."""

_WEIGHT = 0.1  # of the newest measurement in a running mean

log = get_logger(__name__)


class FileCache:
    """Keeps and fetches blocks of one pool. `blocks` gives a thread the pool's KV. Without
    `compares_costs`, reading always counts as worthwhile."""

    def __init__(
        self,
        files: BlockFiles,
        stamps: Stamps,
        blocks: Callable[[], PoolBlocks],
        metrics: WorkerMetrics,
        check_fence: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        compares_costs: bool = True,
    ) -> None:
        self._files = files
        self._stamps = stamps
        self._blocks_to_fill, self._blocks_to_keep = blocks(), blocks()
        self._metrics = metrics
        self._check_fence = check_fence
        self._clock = clock
        self._compares_costs = compares_costs
        self.block_s = 0.0
        """The running mean of the time in which a block is read."""
        self._asked: dict[PrefixHash, float] = {}
        """When each block was last kept, in the order in which prompts asked for them."""
        self._reader = ThreadPoolExecutor(1, "file-reader")
        self._waiting = SimpleQueue[Callable[[], None] | None]()
        self._is_closing = False
        self._paused_until = 0.0
        self._writer = threading.Thread(target=self._write_all, name="file-writer", daemon=True)
        self._writer.start()

    def asked(self, hashes: Sequence[PrefixHash]) -> Mapping[PrefixHash, int]:
        """Note that a prompt has these blocks. Returns those to keep, each with its place in the
        prompt: an earlier prompt had them too, and they were not kept in the last minute."""
        to_keep, now = dict[PrefixHash, int](), self._clock()
        for number, prefix_hash in enumerate(hashes):
            kept_at = self._asked.pop(prefix_hash, None)
            if kept_at is not None and now - kept_at > _KEEP_AGAIN_S:
                to_keep[prefix_hash], kept_at = number, now
            self._asked[prefix_hash] = -math.inf if kept_at is None else kept_at
        while len(self._asked) > _MAX_ASKED:
            del self._asked[next(iter(self._asked))]
        return to_keep

    def keep(
        self, blocks: Iterable[tuple[int, PrefixHash]], to_keep: Mapping[PrefixHash, int]
    ) -> None:
        """Write the committed `blocks` that are in `to_keep`, in the background."""
        for block_id, prefix_hash in blocks:
            if prefix_hash in to_keep and self._waiting.qsize() < _MAX_WAITING:
                block = block_id, prefix_hash, to_keep[prefix_hash]
                self._waiting.put(partial(self._write, *block))

    def drop(self, blocks: Iterable[tuple[int, PrefixHash]]) -> None:
        """Remove blocks that may hold wrong KV, in the background."""
        for _, prefix_hash in blocks:
            self._waiting.put(partial(self._files.remove, prefix_hash))

    def helps(self, allocation: Allocation, block_keys: BlockKeys, ns_per_token: int) -> bool:
        """Whether there is a file of the first block that the pool does not have, and reading takes
        less time than computing at `ns_per_token`, which is 0 if it is not known."""
        hashes = block_keys.trunk.hashes[allocation.num_cached_blocks :]
        self._metrics.file_cache_queries.inc(len(hashes))
        if not hashes or not self._files.has(hashes[0]):
            return False
        computing_s = block_keys.trunk.block_size * ns_per_token * 1e-9
        if self._compares_costs and 0 < computing_s < self.block_s:
            self.block_s *= 1 - _WEIGHT  # so that reading is tried, and measured, again
            return False
        return True

    async def fetch(self, ticket: Ticket, allocation: Allocation, block_keys: BlockKeys) -> Fetched:
        """Read blocks that all sequences of a prompt have, from the first one that the pool does
        not have to the first one without a good file."""
        new = allocation.block_ids[allocation.num_cached_blocks :]
        first = allocation.num_cached_blocks
        loop = asyncio.get_running_loop()
        read = await loop.run_in_executor(self._reader, self._read, block_keys.trunk, first, new)
        cached = allocation.cached(*block_keys.chains)
        computed, copied = block_keys.computed_with_copies(cached, block_keys, read, new)
        return Fetched(computed, len(copied), block_keys.full_among(copied))

    def close(self) -> None:
        """End the threads, after the files that they read and write now."""
        self._is_closing = True
        self._waiting.put(None)
        self._reader.shutdown()
        self._writer.join()

    def _read(self, span: BlockSpan, first: int, targets: Sequence[int]) -> dict[PrefixHash, int]:
        """Read the blocks of `span` from number `first` on. Returns the target of each."""
        began, read = time.perf_counter(), dict[PrefixHash, int]()
        self._check_fence()
        for number, target in zip(range(first, len(span.hashes)), targets, strict=False):
            parent = span.hashes[number - 1] if number else span.parent
            name = BlockName(span.hashes[number], parent, span.tokens_of(number), number)
            try:
                read_file = partial(self._files.read, name)
                if self._is_closing or not self._blocks_to_fill.fill(target, read_file):
                    break
            except BadFile as error:
                log.error("file_cache_corrupt", reason=str(error))
                self._metrics.file_cache_errors.inc()
                break
            read[name.prefix_hash] = target
        self._check_fence()
        span.stamp(self._stamps, read)
        if read:
            self._metrics.file_cache_hits.inc(len(read))
            block_s = (time.perf_counter() - began) / len(read)
            self.block_s += _WEIGHT * (block_s - self.block_s)
        return read

    def _write_all(self) -> None:
        while (work := self._waiting.get()) is not None and not self._is_closing:
            work()

    def _write(self, block_id: int, prefix_hash: PrefixHash, number: int) -> None:
        """Write a block, unless it has a file, the pool overwrites it, or an error was just now."""
        if self._clock() < self._paused_until:
            return
        record, stamp = self._stamps.record(block_id), self._stamps.read(block_id)
        if stamp.state is not StampState.COMMITTED or stamp.prefix_hash != prefix_hash:
            return
        name = BlockName(prefix_hash, stamp.parent, stamp.token_ids, number)
        try:
            if self._files.touch(prefix_hash, number):
                return
            kv = self._blocks_to_keep.content(block_id)
            if self._files.write(name, kv, lambda: self._stamps.record(block_id) == record):
                self._metrics.file_cache_written_blocks.inc()
        except OSError as error:
            self._metrics.file_cache_errors.inc()
            if not self._paused_until:
                log.error("file_cache_paused", reason=str(error))
            self._paused_until = self._clock() + _PAUSE_S
        else:
            self._paused_until = 0.0
