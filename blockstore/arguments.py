"""What the arguments of a ledger's operations may be; the same as in functions/10_keys.lua.

Every function here raises InvalidArgument, and says nothing where all is well.
"""

from collections.abc import Hashable, Sequence

from blockstore.errors import InvalidArgument
from blockstore.store import Growth, PoolSpec, PrefixHash

MAX_TEXT_BYTES = 1024
MAX_NUMBER = 2**53 - 1
"""The server's functions count in doubles."""

HASH_BYTES = 16


def check_texts(**values: str) -> None:
    """Names: 1 to MAX_TEXT_BYTES bytes of UTF-8."""
    for name, value in values.items():
        if not isinstance(value, str) or not 0 < len(_utf8(value)) <= MAX_TEXT_BYTES:
            raise InvalidArgument(f"{name} is no text of 1 to {MAX_TEXT_BYTES} bytes")


def check_numbers(**values: int) -> None:
    """0 to MAX_NUMBER."""
    for name, value in values.items():
        if type(value) is not int or not 0 <= value <= MAX_NUMBER:
            raise InvalidArgument(f"{name} is {value!r}, no number of 0 to {MAX_NUMBER}")


def check_hashes(hashes: Sequence[PrefixHash]) -> None:
    for number, value in enumerate(hashes):
        if not isinstance(value, bytes) or len(value) != HASH_BYTES:
            raise InvalidArgument(f"hash {number} is not {HASH_BYTES} bytes")


def check_blocks(block_ids: Sequence[int]) -> None:
    for block_id in block_ids:
        check_numbers(block_id=block_id)


def check_distinct(values: Sequence[Hashable]) -> None:
    if len(set(values)) != len(values):
        raise InvalidArgument("something is named twice")


def check_pool_id(pool_id: str) -> None:
    """It is the hash tag of the pool's keys, so it has no braces."""
    check_texts(pool_id=pool_id)
    if "{" in pool_id or "}" in pool_id:
        raise InvalidArgument(f"pool_id {pool_id!r} has braces")


def check_spec(spec: PoolSpec) -> None:
    check_texts(model=spec.model, fingerprint=spec.fingerprint)
    check_numbers(
        num_blocks=spec.num_blocks,
        block_size=spec.block_size,
        block_bytes=spec.block_bytes,
        watermark_blocks=spec.watermark_blocks,
    )


def check_growth(growth: Growth) -> None:
    check_texts(holder_id=growth.holder_id)
    check_numbers(epoch=growth.epoch, have=growth.have, total=growth.total)
    if growth.have > growth.total:
        raise InvalidArgument(f"{growth.holder_id} has more blocks than it shall have")


def _utf8(text: str) -> bytes:
    """Empty where it has none: a lone surrogate."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return b""
