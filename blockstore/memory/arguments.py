"""Checks the arguments of a ledger's operations, by the same rules as functions/10_keys.lua.

Every check raises InvalidArgument unless its docstring names another error.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from blockstore.errors import FingerprintMismatch, GeometryMismatch, InvalidArgument
from blockstore.records import Growth, PoolSpec, PrefixHash
from blockstore.store import MAX_BRANCHES

MAX_TEXT_BYTES = 1024
MAX_NUMBER = 2**53 - 1
"""Numbers in the server's functions are doubles, which are exact up to here."""

HASH_BYTES = 16


def check(**arguments: Any) -> None:
    """Check each argument by the rule that `_KINDS` has for its name."""
    for name, value in arguments.items():
        _KINDS[name](name, value)


def check_pool_id(pool_id: str) -> None:
    """Check that a pool's id has no braces, because it is the hash tag of the pool's keys."""
    _check_text("pool_id", pool_id)
    if "{" in pool_id or "}" in pool_id:
        raise InvalidArgument(f"pool_id {pool_id!r} has braces")


def check_prefix(
    hashes: Sequence[PrefixHash], branches: Sequence[Sequence[PrefixHash]], num_blocks: int
) -> None:
    """Check the hashes of an allocation of `num_blocks` blocks."""
    for each in (hashes, *branches):
        check(hashes=each)
    _check_distinct(hashes)
    if len(branches) > MAX_BRANCHES:
        raise InvalidArgument(f"{len(branches)} branches, more than {MAX_BRANCHES}")
    num_hashes = len(set(hashes).union(*branches))
    if num_hashes > num_blocks:
        raise InvalidArgument(f"{num_hashes} hashes for {num_blocks} blocks")


def check_same_pool(ours: PoolSpec, theirs: PoolSpec, worker_id: str) -> None:
    """Check a worker's spec against the pool's. GeometryMismatch, then FingerprintMismatch."""
    for name in ("block_size", "num_blocks", "block_bytes"):
        here, there = getattr(ours, name), getattr(theirs, name)
        if here != there:
            raise GeometryMismatch(f"{name} is {here} in the pool, {there} in {worker_id}")
    if theirs.fingerprint != ours.fingerprint:
        raise FingerprintMismatch(
            f"the pool is for {ours.fingerprint}, {worker_id} computes {theirs.fingerprint}"
        )


def _check_text(name: str, value: str) -> None:
    """Check for 1 to MAX_TEXT_BYTES bytes of UTF-8."""
    if not isinstance(value, str) or not 0 < len(_utf8(value)) <= MAX_TEXT_BYTES:
        raise InvalidArgument(f"{name} is no text of 1 to {MAX_TEXT_BYTES} bytes")


def _check_number(name: str, value: int) -> None:
    """Check for an integer from 0 to MAX_NUMBER."""
    if type(value) is not int or not 0 <= value <= MAX_NUMBER:
        raise InvalidArgument(f"{name} is {value!r}, no number of 0 to {MAX_NUMBER}")


def _check_hashes(_: str, hashes: Sequence[PrefixHash]) -> None:
    for number, value in enumerate(hashes):
        if not isinstance(value, bytes) or len(value) != HASH_BYTES:
            raise InvalidArgument(f"hash {number} is not {HASH_BYTES} bytes")


def _check_block_ids(_: str, block_ids: Sequence[int]) -> None:
    for block_id in block_ids:
        _check_number("block_id", block_id)


def _check_committed(_: str, blocks: Sequence[tuple[int, PrefixHash]]) -> None:
    block_ids = [block_id for block_id, _hash in blocks]
    check(block_ids=block_ids, hashes=[prefix_hash for _id, prefix_hash in blocks])
    _check_distinct(block_ids)


def _check_distinct(values: Sequence[Hashable]) -> None:
    if len(set(values)) != len(values):
        raise InvalidArgument("something is named twice")


def _check_spec(_: str, spec: PoolSpec) -> None:
    _check_text("model", spec.model)
    _check_text("fingerprint", spec.fingerprint)
    for name in ("num_blocks", "block_size", "block_bytes", "watermark_blocks"):
        _check_number(name, getattr(spec, name))


def _check_growths(_: str, growths: Sequence[Growth]) -> None:
    for growth in growths:
        check(holder_id=growth.holder_id, epoch=growth.epoch)
        _check_number("have", growth.have)
        _check_number("total", growth.total)
        if growth.have > growth.total:
            raise InvalidArgument(f"{growth.holder_id} has more blocks than it shall have")


def _utf8(text: str) -> bytes:
    """The text in UTF-8, or nothing if it cannot be encoded (a lone surrogate)."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return b""


_KINDS: dict[str, Callable[[str, Any], None]] = {
    "holder_id": _check_text,
    "worker_id": _check_text,
    "epoch": _check_number,
    "order": _check_number,
    "num_blocks": _check_number,
    "lease_ms": _check_number,
    "block_ids": _check_block_ids,
    "hashes": _check_hashes,
    "blocks": _check_committed,
    "growths": _check_growths,
    "spec": _check_spec,
}
