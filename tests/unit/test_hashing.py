"""Prefix hashes are chained, rooted, and the same on every machine."""

import pytest
import xxhash

from blockstore.hashing import next_hash, prefix_hashes, root_hash

ROOT = root_hash("fingerprint", b"secret", "salt")


def test_chain_is_xxh3_over_parent_and_little_endian_ids() -> None:
    """Two workers of different byte order compute the same hash."""
    expected = xxhash.xxh3_128_digest(ROOT + bytes([1, 0, 0, 0, 0, 1, 0, 0]))

    assert next_hash(ROOT, [1, 256]) == expected
    assert len(expected) == 16


def test_only_full_blocks_are_hashed() -> None:
    """9 tokens in blocks of 4 have two hashes, each of which continues the one before."""
    token_ids = list(range(9))
    first = next_hash(ROOT, token_ids[:4])

    assert prefix_hashes(ROOT, token_ids, 4) == (first, next_hash(first, token_ids[4:8]))


@pytest.mark.parametrize(("num_tokens", "num_hashes"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2)])
def test_number_of_hashes(num_tokens: int, num_hashes: int) -> None:
    assert len(prefix_hashes(ROOT, range(num_tokens), 4)) == num_hashes


def test_equal_blocks_after_different_prefixes_differ() -> None:
    """A hash names the whole prefix, not its last block."""
    a = prefix_hashes(ROOT, [1, 1, 7, 7], 2)
    b = prefix_hashes(ROOT, [2, 2, 7, 7], 2)

    assert len({*a, *b}) == 4


@pytest.mark.parametrize(
    "parts",
    [
        ("fingerprint2", b"secret", "salt"),
        ("fingerprint", b"secret2", "salt"),
        ("fingerprint", b"secret", "salt2"),
        ("fingerprint", b"secret", ""),
        ("fingerprints", b"secret", "alt"),
    ],
)
def test_all_parts_of_the_root_matter(parts: tuple[str, bytes, str]) -> None:
    assert root_hash(*parts) != ROOT


def test_parts_do_not_run_into_each_other() -> None:
    """The salt comes from the client, which must not be able to spell another tenant's root."""
    derived_free = {root_hash("a" * n, b"", "a" * (8 - n)) for n in range(9)}

    assert len(derived_free) == 9


def test_hashes_are_stable_across_releases() -> None:
    """Stamps outlive the process that wrote them: these values must not change unnoticed."""
    assert root_hash("fp", b"k", "").hex() == "35ea3be4f9b4f676db95df26db03922a"
    assert prefix_hashes(bytes(16), [1, 2, 3, 4], 2)[1].hex() == "154f19ec1cd762d22e21ca7bd3ac2558"


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_token_ids_out_of_range_are_refused(token_id: int) -> None:
    with pytest.raises(ValueError, match="token ids must be in"):
        prefix_hashes(ROOT, [0, token_id], 1)
