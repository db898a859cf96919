"""The interface of a mover's transport: reads from the memory of another mover into its own.

share      register this pool's arena and stamps once; what others need to read them
connect    prepare a descriptor for each block and stamp of another pool
prepare    register memory of this process, into which reads land
read       begin a read; it lands until `poll` says DONE or FAILED, whoever gave it up meanwhile
"""

import asyncio
import ctypes
import mmap
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Protocol

from services.pool.header import PoolHeader
from services.pool.stamps import Stamps, record_bytes


class TransportError(Exception):
    """The transport cannot do it: the other side is gone, or its memory is not readable."""


class OutOfReach(TransportError):
    """This side can never read that memory, whatever it tries."""


class Area(Enum):
    """The memory of a pool that other movers read."""

    BLOCKS = "blocks"
    STAMPS = "stamps"


class State(Enum):
    """The state of a read."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"  # parts of it may have landed; nothing lands any more


@dataclass(frozen=True, slots=True)
class Region:
    """Memory with one item (a block, a stamp) after the other."""

    parts: tuple[int, ...]
    """The addresses of the arenas: with several ranks a block has a part in the arena of each."""
    item_bytes: int
    num_items: int
    memories: tuple[object, ...] = ()
    """The mappings of this process, which this region keeps alive."""

    @classmethod
    def of(cls, memories: Sequence[mmap.mmap], item_bytes: int, num_items: int) -> "Region":
        parts = tuple(map(_address, memories))
        return cls(parts, item_bytes, num_items, tuple(memories))

    def places(self, items: Sequence[int]) -> list[int]:
        """Return the numbers of all parts of these items: part 0 of each item, then part 1 ..."""
        num_parts = len(self.parts)
        return [part * self.num_items + item for part in range(num_parts) for item in items]


class Transfer(Protocol):
    def poll(self) -> State: ...

    def release(self) -> None:
        """Free what the transport keeps for the transfer, which is not RUNNING any more."""


class Transport(Protocol):
    """Reads the memory of other movers. Prepared regions and sources are the transport's own
    objects. All methods may raise TransportError."""

    name: ClassVar[str]
    """Both sides of a transfer need a transport of the same name."""

    def share(self, blocks: Region, stamps: Region) -> bytes: ...

    def allocate(self, num_parts: int, item_bytes: int, num_items: int) -> Region:
        """Allocate memory of the kind that blocks are in."""
        ...

    def prepare(self, region: Region) -> Any: ...

    def forget(self, prepared: Any) -> None:
        """Undo `prepare`, when no read to the region is RUNNING."""

    def connect(self, memory: bytes) -> Any: ...

    def read(
        self, source: Any, area: Area, items: Sequence[int], target: Any, places: Sequence[int]
    ) -> Transfer:
        """Read the items of the source's area to these places of a prepared region."""
        ...

    def disconnect(self, source: Any) -> None:
        """Forget a source from which no read is RUNNING."""

    def close(self) -> None:
        """Answer no reads any more, when no read of this side is RUNNING."""


_POLL_S = 0.0005


async def landed(
    transfer: Transfer, while_running: Callable[[], Awaitable[None]] | None = None
) -> None:
    """Wait, without a time limit, until nothing lands any more; `while_running` is called
    meanwhile. Raises TransportError if the read has failed."""
    while (state := transfer.poll()) is State.RUNNING:
        if while_running is not None:
            await while_running()
        await asyncio.sleep(_POLL_S)
    transfer.release()
    if state is State.FAILED:
        raise TransportError("a read failed")


def stamps_region(stamps: Stamps, header: PoolHeader) -> Region:
    size = record_bytes(header.layout.block_size)
    return Region.of([stamps.memory], size, header.num_blocks)


def _address(memory: mmap.mmap) -> int:
    view = ctypes.c_char.from_buffer(memory)
    return ctypes.addressof(view)
