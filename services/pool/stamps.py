"""Stamps: one record per block of its content. The worker that writes a block writes its stamp; a
worker that adopts the block compares the stamp.

All stamps are in one file that all processes of the pool map. A record has a fixed size:

    offset  0   state         1 byte, 7 unused
            8   owner         8 bytes, token of the holder that writes the block
           16   prefix hash   16 bytes
           32   parent hash   16 bytes
           48   token ids     block_size x 4 bytes, native order; record padded to 8

The order of writes is owner -> (KV) -> fields -> state. So a process that reads COMMITTED reads the
fields of finished KV. A record is reset to PRIVATE before its block gets other content. The write
of the one-byte state is atomic; readers learn of a block through the block store, which orders the
other writes.
"""

import hashlib
import mmap
import os
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from blockstore.records import Content, PrefixHash

_HEAD = struct.Struct("=B7x8s16s16s")
_OWNER_AT = 8
_FIELDS_AT = 16
_HASHES_BYTES = 32


class StampState(IntEnum):
    FREE = 0
    PRIVATE = 1
    COMMITTED = 2


@dataclass(frozen=True, slots=True)
class Stamp:
    """One record. `owner` is an `owner_token`. The fields behind it are valid only if the state is
    COMMITTED."""

    state: StampState
    owner: bytes
    prefix_hash: PrefixHash
    parent: PrefixHash
    token_ids: tuple[int, ...]


def owner_token(holder_id: str) -> bytes:
    """The 8 bytes that identify a holder in stamps. Holder ids are used once, so tokens are too."""
    return hashlib.blake2b(holder_id.encode(), digest_size=8).digest()


def record_bytes(block_size: int) -> int:
    """The size of one stamp."""
    return -(-(_FIELDS_AT + _HASHES_BYTES + 4 * block_size) // 8) * 8


class Stamps:
    """The mapped stamps of one pool. Only a block's holder may write its stamp (law 4)."""

    def __init__(self, path: Path | None, num_blocks: int, block_size: int) -> None:
        """Map the file. Raises ValueError if its size does not fit this geometry.
        Without a path the stamps are in this process's memory, all FREE: copies of another pool's
        stamps."""
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._record_bytes = record_bytes(block_size)
        num_bytes = num_blocks * self._record_bytes
        self._bytes = mmap.mmap(-1, num_bytes) if path is None else map_file(path, num_bytes)

    @property
    def memory(self) -> mmap.mmap:
        return self._bytes

    def record(self, block_id: int) -> bytes:
        """The whole record of a block."""
        at = self._at(block_id)
        return self._bytes[at : at + self._record_bytes]

    def mark_owned(self, block_ids: Sequence[int], owner: str) -> None:
        """Stamp blocks as PRIVATE blocks of `owner` (a holder's id), before the first write into
        them: their old content is no longer valid."""
        token = owner_token(owner)
        for block_id in block_ids:
            at = self._at(block_id)
            self._bytes[at] = StampState.PRIVATE
            self._bytes[at + _OWNER_AT : at + _FIELDS_AT] = token

    def complete(
        self, block_id: int, prefix_hash: PrefixHash, parent: PrefixHash, token_ids: Sequence[int]
    ) -> None:
        """Stamp a block as COMMITTED: its KV is complete and is never written again.

        The caller first makes sure that the KV is written (on a GPU by an event), and calls the
        store's `commit` afterwards. `token_ids` are exactly block_size. A second call with equal
        content changes nothing. Raises ValueError if the block is not PRIVATE, or a length is
        wrong.
        """
        fields = prefix_hash + parent + array("I", token_ids).tobytes()
        if len(fields) != self._fields_bytes:
            raise ValueError(
                f"a stamp takes two hashes of 16 bytes and {self._block_size} tokens, "
                f"not {len(prefix_hash)}, {len(parent)} and {len(token_ids)}"
            )
        at = self._at(block_id)
        if self._is_committed_with(block_id, fields):
            return
        if self._bytes[at] != StampState.PRIVATE:
            state = StampState(self._bytes[at]).name
            raise ValueError(f"block {block_id} is {state}, not PRIVATE")
        self._bytes[at + _FIELDS_AT : at + _FIELDS_AT + len(fields)] = fields
        self._bytes[at] = StampState.COMMITTED

    def read(self, block_id: int) -> Stamp:
        at = self._at(block_id)
        state, owner, prefix_hash, parent = _HEAD.unpack_from(self._bytes, at)
        tokens_at = at + _FIELDS_AT + _HASHES_BYTES
        token_ids = array("I", self._bytes[tokens_at : tokens_at + 4 * self._block_size])
        return Stamp(StampState(state), owner, prefix_hash, parent, tuple(token_ids))

    def first_mismatch(
        self,
        block_ids: Sequence[int],
        parent: PrefixHash,
        hashes: Sequence[PrefixHash],
        token_ids: Sequence[int],
    ) -> int | None:
        """The index of the first adopted block whose stamp is not exactly as expected; None if all
        stamps match.

        `block_ids` are in sequence order, `hashes` and the len(block_ids) * block_size `token_ids`
        are of these blocks, and `parent` is the hash of the block before them (the root hash at the
        start of a prompt). Raises ValueError if the lengths do not match.
        """
        tokens = memoryview(array("I", token_ids)).cast("B")
        num_token_bytes = 4 * self._block_size
        if len(hashes) != len(block_ids) or len(tokens) != len(block_ids) * num_token_bytes:
            raise ValueError(
                f"{len(block_ids)} blocks of {self._block_size} tokens do not match "
                f"{len(hashes)} hashes and {len(token_ids)} tokens"
            )
        for index, (block_id, prefix_hash) in enumerate(zip(block_ids, hashes, strict=True)):
            start = index * num_token_bytes
            fields = prefix_hash + parent + tokens[start : start + num_token_bytes]
            if not self._is_committed_with(block_id, fields):
                return index
            parent = prefix_hash
        return None

    def are_written_by(self, block_ids: Sequence[int], owner: str) -> bool:
        """Whether the stamps show that this holder, and no other, is writing all these blocks."""
        token = owner_token(owner)
        starts = [self._at(block_id) for block_id in block_ids]
        return all(
            self._bytes[at] == StampState.PRIVATE
            and self._bytes[at + _OWNER_AT : at + _FIELDS_AT] == token
            for at in starts
        )

    def is_committed(self, block_id: int) -> bool:
        """Whether the stamp is COMMITTED, so that its fields describe finished KV."""
        return bool(self._bytes[self._at(block_id)] == StampState.COMMITTED)

    def complete_blocks(self, owners: Iterable[str]) -> dict[str, list[int]]:
        """The COMMITTED blocks of each owner that has any, for the reaper of a dead worker. Reads
        all stamps."""
        holders = {owner_token(owner): owner for owner in owners}
        head = struct.Struct(f"=B7x8s{self._record_bytes - _FIELDS_AT}x")
        found: dict[str, list[int]] = {}
        with memoryview(self._bytes) as records:
            for block_id, (state, token) in enumerate(head.iter_unpack(records)):
                if state == StampState.COMMITTED and token in holders:
                    found.setdefault(holders[token], []).append(block_id)
        return found

    def contents(self, at_least: int) -> tuple[Content, ...]:
        """The content of the blocks from block 0 up to the last one that was ever used, but of at
        least `at_least` blocks.

        The rank of a finished block follows from its depth in its prompt. The deepest blocks come
        first, so that the end of a prompt is evicted before its beginning.
        """
        record = struct.Struct(f"=B7x8x16s16s{self._record_bytes - _FIELDS_AT - _HASHES_BYTES}x")
        with memoryview(self._bytes) as records:
            stamps = list(record.iter_unpack(records))
        while len(stamps) > at_least and stamps[-1][0] == StampState.FREE:
            stamps.pop()
        finished = {h: parent for state, h, parent in stamps if state == StampState.COMMITTED}
        depths = _depths(finished)
        blocks = [i for i, stamp in enumerate(stamps) if stamp[0] == StampState.COMMITTED]
        blocks.sort(key=lambda block_id: -depths[stamps[block_id][1]])
        ranks = {block_id: rank for rank, block_id in enumerate(blocks)}
        return tuple(
            Content(prefix_hash, rank=ranks[block_id])
            if state == StampState.COMMITTED
            else Content(private=state == StampState.PRIVATE)
            for block_id, (state, prefix_hash, _) in enumerate(stamps)
        )

    @property
    def is_closed(self) -> bool:
        return self._bytes.closed

    def close(self) -> None:
        """Unmap the file. May be called again."""
        self._bytes.close()

    @property
    def _fields_bytes(self) -> int:
        return _HASHES_BYTES + 4 * self._block_size

    def _at(self, block_id: int) -> int:
        if not 0 <= block_id < self._num_blocks:
            raise IndexError(f"block {block_id} of a pool of {self._num_blocks}")
        return block_id * self._record_bytes

    def _is_committed_with(self, block_id: int, fields: bytes) -> bool:
        """Whether the stamp is COMMITTED, with exactly these hashes and token ids."""
        at = self._at(block_id)
        if self._bytes[at] != StampState.COMMITTED:
            return False
        return self._bytes[at + _FIELDS_AT : at + _FIELDS_AT + len(fields)] == fields


def _depths(parent_of: Mapping[PrefixHash, PrefixHash]) -> dict[PrefixHash, int]:
    """For each block the number of its ancestors that exist."""
    depths: dict[PrefixHash, int] = {}
    for prefix_hash in parent_of:
        chain = [prefix_hash]
        while chain[-1] not in depths and parent_of[chain[-1]] in parent_of:
            if len(chain) > len(parent_of):
                break  # a cycle, which no prompt can make: these records are damaged
            chain.append(parent_of[chain[-1]])
        depth = depths.get(chain[-1], 0)
        for number, ancestor in enumerate(reversed(chain)):
            depths[ancestor] = depth + number
    return depths


def map_file(path: Path, num_bytes: int) -> mmap.mmap:
    """Map a file of a pool. Raises ValueError if it has another size."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size != num_bytes:
            raise ValueError(f"{path} has {os.fstat(fd).st_size} bytes instead of {num_bytes}")
        return mmap.mmap(fd, num_bytes)
    finally:
        os.close(fd)
