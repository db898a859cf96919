"""Errors of the block store.

BlockStoreError
├── StoreUnavailable      no answer from the server within the limit
├── StoreLost             the server lost its data (another run_id, or the pool is unknown to it)
│   └── PoolGone          and the pool's content is gone too: nothing to recover
├── StoreUnsuitable       the server is too old, evicts keys, or lacks functions
└── LedgerError           the ledger refused; carries its code and numbers
    ├── PoolExists  UnknownPool  UnknownWorker
    ├── Recovering            the ledger was lost, and is not whole again yet
    ├── GeometryMismatch  FingerprintMismatch
    ├── WorkerFenced      a fenced worker may only release
    ├── WorkerNotEmpty    a worker that leaves still holds or waits
    ├── OutOfBlocks       needed > available; the caller of allocate is a waiter now
    ├── MustWait          an earlier request waits
    ├── StaleHolder       released, or at another epoch
    ├── NotHeld           a block is not held by this holder, or already carries another hash
    └── InvalidArgument   an argument can never be right: out of range, malformed, named twice
"""

from typing import ClassVar


class BlockStoreError(Exception):
    """Root of all errors of the block store."""


class StoreUnavailable(BlockStoreError):
    """The server did not answer within the limit."""


class StoreLost(BlockStoreError):
    """The server answers, but it is not the one that knew this pool."""


class PoolGone(StoreLost):
    """Neither the server nor anybody else knows what the pool held."""


class StoreUnsuitable(BlockStoreError):
    """The server cannot carry a block store."""


class LedgerError(BlockStoreError):
    """The ledger refused an operation; `code` is what the server's functions answer, before its
    numbers."""

    code: ClassVar[str]


class PoolExists(LedgerError):
    code = "POOL_EXISTS"


class UnknownPool(LedgerError):
    code = "UNKNOWN_POOL"


class Recovering(LedgerError):
    code = "RECOVERING"


class UnknownWorker(LedgerError):
    code = "UNKNOWN_WORKER"


class GeometryMismatch(LedgerError):
    code = "GEOMETRY_MISMATCH"


class FingerprintMismatch(LedgerError):
    code = "FINGERPRINT_MISMATCH"


class WorkerFenced(LedgerError):
    code = "FENCED"


class WorkerNotEmpty(LedgerError):
    code = "NOT_EMPTY"


class OutOfBlocks(LedgerError):
    """`needed` new blocks were asked for, `available` could be had."""

    code = "OUT_OF_BLOCKS"

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"needs {needed} new blocks, {available} are available")
        self.needed = needed
        self.available = available


class MustWait(LedgerError):
    code = "WAIT"


class StaleHolder(LedgerError):
    code = "STALE_HOLDER"


class NotHeld(LedgerError):
    code = "NOT_HELD"


class InvalidArgument(LedgerError):
    code = "INVALID"


def _leaves(cls: type[LedgerError]) -> list[type[LedgerError]]:
    return [leaf for sub in cls.__subclasses__() for leaf in (_leaves(sub) or [sub])]


BY_CODE: dict[str, type[LedgerError]] = {error.code: error for error in _leaves(LedgerError)}
"""What a function's error reply `CODE numbers` means; a test knows that every code in functions/ is
here."""
