"""Prefix hashes: chained xxh3-128 over (parent hash, the block's token ids).

A chain is rooted in the pool's fingerprint, the deployment's secret, the request's cache salt and
its LoRA adapter: requests that differ in one of them share no blocks. xxh3 is fast, but it is no
MAC: Quire compares a block's token ids with those in the block's stamp, and never relies on the
hash alone.
"""

import hashlib
import struct
from collections.abc import Sequence

from xxhash import xxh3_128_digest

from blockstore.records import PrefixHash

_TOKEN_ID_BYTES = 4


def root_hash(fingerprint: str, secret: bytes, cache_salt: str, adapter: str = "") -> PrefixHash:
    """Return the parent hash of a sequence's first block: 16 bytes.

    Every part is hashed behind its length, so that ("ab", "c") and ("a", "bc") differ. Only 64 bits
    derived from the secret are hashed, so that nobody can find the secret itself by guessing with a
    fast hash. `adapter` is the digest of a LoRA adapter, or empty for the model alone.
    """
    derived = hashlib.blake2b(secret, digest_size=8, person=b"quire-prefix").digest()
    parts = [fingerprint.encode(), derived, cache_salt.encode()]
    if adapter:
        parts.append(adapter.encode())
    return xxh3_128_digest(b"".join(struct.pack("<Q", len(part)) + part for part in parts))


def next_hash(parent: PrefixHash, token_ids: Sequence[int]) -> PrefixHash:
    """Return the hash of the block that follows `parent` and contains `token_ids`, a full block.
    Raises ValueError if a token id is not in [0, 2**32)."""
    return xxh3_128_digest(parent + _packed(token_ids))


def prefix_hashes(
    root: PrefixHash, token_ids: Sequence[int], block_size: int
) -> tuple[PrefixHash, ...]:
    """Return the hashes of the len(token_ids) // block_size full blocks of `token_ids`, in order.
    Raises ValueError if a token id is not in [0, 2**32)."""
    block_bytes = block_size * _TOKEN_ID_BYTES
    packed = _packed(token_ids)
    hashes = [root]
    for start in range(0, len(packed) - block_bytes + 1, block_bytes):
        hashes.append(xxh3_128_digest(hashes[-1] + packed[start : start + block_bytes]))
    return tuple(hashes[1:])


def _packed(token_ids: Sequence[int]) -> bytes:
    """Return the token ids as uint32, little-endian on every machine."""
    try:
        return struct.pack(f"<{len(token_ids)}I", *token_ids)
    except struct.error as exc:
        raise ValueError(f"token ids must be in [0, 2**32): {exc}") from exc
