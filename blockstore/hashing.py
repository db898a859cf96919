"""Prefix hashes: chained xxh3-128 over (parent hash, the block's token ids).

A chain is rooted in what must never be shared across: the pool's fingerprint, the deployment's
secret and the request's cache salt. xxh3 is fast and no MAC: that a block really holds the tokens
which its hash promises is checked against the block's stamp, never concluded from the hash.
"""

import hashlib
import struct
from collections.abc import Sequence

from xxhash import xxh3_128_digest

from blockstore.records import PrefixHash

_TOKEN_ID_BYTES = 4


def root_hash(fingerprint: str, secret: bytes, cache_salt: str) -> PrefixHash:
    """Parent of a sequence's first block: 16 bytes.

    Every part goes in behind its length, so that ("ab", "c") and ("a", "bc") differ. Of the secret
    only 64 derived bits do: the secret itself must not be open to guessing through a fast hash.
    """
    derived = hashlib.blake2b(secret, digest_size=8, person=b"quire-prefix").digest()
    parts = (fingerprint.encode(), derived, cache_salt.encode())
    return xxh3_128_digest(b"".join(struct.pack("<Q", len(part)) + part for part in parts))


def next_hash(parent: PrefixHash, token_ids: Sequence[int]) -> PrefixHash:
    """Hash of the block that follows `parent` and holds `token_ids` (one whole block of them).

    ValueError: a token id is not in [0, 2**32).
    """
    return xxh3_128_digest(parent + _packed(token_ids))


def prefix_hashes(
    root: PrefixHash, token_ids: Sequence[int], block_size: int
) -> tuple[PrefixHash, ...]:
    """Hashes of the full blocks of `token_ids`: len(token_ids) // block_size of them, in order.

    ValueError: a token id is not in [0, 2**32).
    """
    block_bytes = block_size * _TOKEN_ID_BYTES
    packed = _packed(token_ids)
    hashes = [root]
    for start in range(0, len(packed) - block_bytes + 1, block_bytes):
        hashes.append(xxh3_128_digest(hashes[-1] + packed[start : start + block_bytes]))
    return tuple(hashes[1:])


def _packed(token_ids: Sequence[int]) -> bytes:
    """Little-endian uint32, whatever the machine."""
    try:
        return struct.pack(f"<{len(token_ids)}I", *token_ids)
    except struct.error as exc:
        raise ValueError(f"token ids must be in [0, 2**32): {exc}") from exc
