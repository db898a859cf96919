"""Errors of the block store.

BlockStoreError
├── StoreUnavailable      no answer from the server within the limit
│   └── NotPrimary        the server that answers is not, or no longer, the primary of the data
├── StoreLost             the server lost its data (another run_id, or the pool is unknown to it)
│   └── PoolGone          the pool's content is lost, for example with its GPU
├── StoreUnsuitable       the server is too old, evicts keys, or has other functions of this name
└── LedgerError           the ledger refused an operation; has a code and numbers
    ├── PoolExists  UnknownPool  UnknownWorker
    ├── Recovering        the ledger was lost, and its recovery is not over
    ├── GeometryMismatch  FingerprintMismatch
    ├── WorkerFenced      a fenced worker may only release
    ├── LeaseHeld         a member on another host is reaped only when its lease has ended
    ├── WorkerNotEmpty    a worker that leaves still has holders or waits
    ├── OutOfBlocks       needed > available; after `allocate` the holder is a waiter
    ├── MustWait          an earlier request waits
    ├── StaleHolder       the holder was released, or is at another epoch
    ├── NotHeld           a block is not held by this holder, or already carries another hash
    └── InvalidArgument   an argument can never be right: out of range, malformed, named twice
"""

from typing import ClassVar


class BlockStoreError(Exception):
    """Root of all errors of the block store."""


class StoreUnavailable(BlockStoreError):
    """The server did not answer within the limit."""


class NotPrimary(StoreUnavailable):
    """The server that answers is not, or no longer, the primary of the data: connect again."""


class StoreLost(BlockStoreError):
    """The server answers, but has lost its data."""


class PoolGone(StoreLost):
    """The pool's content is gone: nothing can be recovered, whether the ledger is there or not."""


class StoreUnsuitable(BlockStoreError):
    """The server cannot hold a block store."""


class LedgerError(BlockStoreError):
    """The ledger refused an operation; `code` begins the error reply of the server's functions."""

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


class LeaseHeld(LedgerError):
    code = "LEASED"


class WorkerNotEmpty(LedgerError):
    code = "NOT_EMPTY"


class OutOfBlocks(LedgerError):
    """The call needs `needed` new blocks; only `available` can be allocated."""

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
"""The error for each code with which a function's error reply begins. A test checks that every code
in functions/ is here."""
