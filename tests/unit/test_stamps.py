"""Stamps: a block's stamp names its content, and no other claim is accepted (law 6)."""

import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.pool.stamps import Stamps, StampState, owner_token, record_bytes

ROOT, H0, H1, OTHER = (bytes([value]) * 16 for value in (1, 2, 3, 9))
TOKENS = (10, 11, 12, 13, 20, 21, 22, 23)
NUM_BLOCKS, BLOCK_SIZE = 11, 4


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "stamps"
    path.write_bytes(bytes(NUM_BLOCKS * record_bytes(BLOCK_SIZE)))
    return path


@pytest.fixture
def stamps(path: Path) -> Iterator[Stamps]:
    stamps = Stamps(path, NUM_BLOCKS, BLOCK_SIZE)
    yield stamps
    stamps.close()


def write_prefix(stamps: Stamps) -> None:
    """Holder "h" writes TOKENS into blocks 7 and 2."""
    stamps.mark_owned([7, 2], "h")
    stamps.complete(7, H0, ROOT, TOKENS[:4])
    stamps.complete(2, H1, H0, TOKENS[4:])


@pytest.mark.parametrize(
    ("block_size", "size"), [(1, 56), (2, 56), (4, 64), (16, 112), (256, 1072)]
)
def test_a_record_is_two_hashes_the_tokens_and_16_bytes_padded_to_8(
    block_size: int, size: int
) -> None:
    assert record_bytes(block_size) == size


def test_a_new_block_is_free_then_private_then_committed(stamps: Stamps) -> None:
    assert stamps.read(3).state is StampState.FREE
    stamps.mark_owned([3], "h")
    assert stamps.read(3).state is StampState.PRIVATE
    assert stamps.read(3).owner == owner_token("h")
    stamps.complete(3, H0, ROOT, (1, 2, 3, 2**32 - 1))
    stamp = stamps.read(3)
    assert (stamp.state, stamp.owner) == (StampState.COMMITTED, owner_token("h"))
    assert (stamp.prefix_hash, stamp.parent) == (H0, ROOT)
    assert stamp.token_ids == (1, 2, 3, 2**32 - 1)


def test_neighbours_are_untouched(stamps: Stamps) -> None:
    write_prefix(stamps)
    touched = {
        block for block in range(NUM_BLOCKS) if stamps.read(block).state is not StampState.FREE
    }
    assert touched == {2, 7}


def test_an_adopted_prefix_that_says_what_was_asked_for_matches(stamps: Stamps) -> None:
    write_prefix(stamps)
    assert stamps.first_mismatch([7, 2], ROOT, [H0, H1], TOKENS) is None
    assert stamps.first_mismatch([2], H0, [H1], TOKENS[4:]) is None
    assert stamps.first_mismatch([], ROOT, [], ()) is None


@pytest.mark.parametrize(
    ("block_ids", "parent", "hashes", "token_ids", "index"),
    [
        ([7, 2], OTHER, [H0, H1], TOKENS, 0),
        ([7, 2], ROOT, [OTHER, H1], TOKENS, 0),
        ([7, 2], ROOT, [H0, OTHER], TOKENS, 1),
        ([7, 2], ROOT, [H0, H1], (*TOKENS[:3], 99, *TOKENS[4:]), 0),
        ([7, 2], ROOT, [H0, H1], (*TOKENS[:7], 99), 1),
        ([2, 7], ROOT, [H0, H1], TOKENS, 0),
        ([7, 3], ROOT, [H0, H1], TOKENS, 1),
    ],
    ids=["parent", "hash", "second hash", "token", "last token", "order", "free block"],
)
def test_a_difference_is_a_mismatch_at_its_block(
    stamps: Stamps,
    block_ids: list[int],
    parent: bytes,
    hashes: list[bytes],
    token_ids: tuple[int, ...],
    index: int,
) -> None:
    write_prefix(stamps)
    assert stamps.first_mismatch(block_ids, parent, hashes, token_ids) == index


def test_a_second_blocks_parent_is_compared_with_the_first_ones_hash(stamps: Stamps) -> None:
    stamps.mark_owned([7, 2], "h")
    stamps.complete(7, H0, ROOT, TOKENS[:4])
    stamps.complete(2, H1, OTHER, TOKENS[4:])
    assert stamps.first_mismatch([7, 2], ROOT, [H0, H1], TOKENS) == 1


def test_a_block_given_to_a_new_owner_says_nothing_of_its_old_content(stamps: Stamps) -> None:
    write_prefix(stamps)
    stamps.mark_owned([2], "next")
    assert stamps.first_mismatch([7, 2], ROOT, [H0, H1], TOKENS) == 1


def test_completing_again_changes_nothing_and_a_finished_block_is_never_rewritten(
    stamps: Stamps,
) -> None:
    write_prefix(stamps)
    stamps.complete(2, H1, H0, TOKENS[4:])
    with pytest.raises(ValueError, match="block 2 is COMMITTED"):
        stamps.complete(2, H1, H0, TOKENS[:4])
    with pytest.raises(ValueError, match="block 5 is FREE"):
        stamps.complete(5, H1, H0, TOKENS[:4])
    assert stamps.read(2).token_ids == TOKENS[4:]


@pytest.mark.parametrize("token_ids", [TOKENS[:3], TOKENS[:5], ()])
def test_a_stamp_is_of_a_full_block(stamps: Stamps, token_ids: tuple[int, ...]) -> None:
    stamps.mark_owned([1], "h")
    with pytest.raises(ValueError, match="4 tokens"):
        stamps.complete(1, H0, ROOT, token_ids)
    assert stamps.read(1).state is StampState.PRIVATE


@pytest.mark.parametrize("block_id", [-1, NUM_BLOCKS])
def test_blocks_outside_the_pool_are_refused(stamps: Stamps, block_id: int) -> None:
    with pytest.raises(IndexError):
        stamps.mark_owned([block_id], "h")
    with pytest.raises(IndexError):
        stamps.first_mismatch([block_id], ROOT, [H0], TOKENS[:4])


def test_lengths_that_do_not_fit_are_an_error_not_a_match(stamps: Stamps) -> None:
    with pytest.raises(ValueError, match="do not match"):
        stamps.first_mismatch([7, 2], ROOT, [H0], TOKENS)
    with pytest.raises(ValueError, match="do not match"):
        stamps.first_mismatch([7], ROOT, [H0], TOKENS)


def test_a_dead_workers_complete_blocks_are_found_by_holder(stamps: Stamps) -> None:
    write_prefix(stamps)
    stamps.mark_owned([4], "h")  # Private: not finished.
    stamps.mark_owned([5, 6], "other")
    stamps.complete(5, OTHER, ROOT, TOKENS[:4])
    assert stamps.complete_blocks(["h", "empty"]) == {"h": [2, 7]}
    assert stamps.complete_blocks(["other"]) == {"other": [5]}


class Killed(Exception):
    """Ends a process in the middle of its writes."""


class DyingMemory:
    """Takes one write, and fails at the next one."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._num_writes = 0

    def __getitem__(self, where: Any) -> Any:
        return self._memory[where]

    def __setitem__(self, where: Any, what: Any) -> None:
        self._num_writes += 1
        if self._num_writes > 1:
            raise Killed
        self._memory[where] = what


@pytest.mark.parametrize(
    "write",
    [
        lambda stamps: stamps.complete(3, H0, ROOT, TOKENS[:4]),
        lambda stamps: stamps.mark_owned([7], "another"),
    ],
    ids=["complete", "own"],
)
def test_a_writer_killed_between_two_writes_leaves_no_valid_stamp(
    stamps: Stamps, write: Callable[[Stamps], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block 3 was private, and 7 committed by h with H0: each still is, or has no valid stamp."""
    write_prefix(stamps)
    stamps.mark_owned([3], "h")
    with monkeypatch.context() as dying:
        dying.setattr(stamps, "_bytes", DyingMemory(stamps._bytes))
        with pytest.raises(Killed):
            write(stamps)
    for block_id, prefix_hash in ((3, None), (7, H0)):
        stamp = stamps.read(block_id)
        if stamp.state is StampState.COMMITTED:
            assert (stamp.owner, stamp.prefix_hash) == (owner_token("h"), prefix_hash)


def test_two_mappings_of_one_file_see_each_other(path: Path, stamps: Stamps) -> None:
    other = Stamps(path, NUM_BLOCKS, BLOCK_SIZE)
    write_prefix(other)
    assert stamps.first_mismatch([7, 2], ROOT, [H0, H1], TOKENS) is None
    other.close()


def test_a_file_of_another_geometry_is_refused(path: Path) -> None:
    with pytest.raises(ValueError, match="704 bytes instead of 1232"):
        Stamps(path, NUM_BLOCKS, 16)


def test_contents_rank_tails_before_heads(tmp_path: Path) -> None:
    """For a rebuilt ledger: the deepest block of a prompt is evicted first; a block after the last
    used one has no content."""
    path = tmp_path / "stamps"
    path.write_bytes(bytes(8 * record_bytes(4)))
    stamps = Stamps(path, 8, 4)
    a, b, c, other = (bytes([number]) * 16 for number in range(1, 5))
    stamps.mark_owned([0, 1, 2, 4, 5], "h")
    tokens = (1, 2, 3, 4)
    for block_id, prefix_hash, parent in ((2, a, bytes(16)), (0, b, a), (4, c, b), (1, other, a)):
        stamps.complete(block_id, prefix_hash, parent, tokens)
    contents = stamps.contents(at_least=7)
    assert [content.prefix_hash for content in contents] == [b, other, a, None, c, None, None]
    assert [content.private for content in contents] == [*[False] * 5, True, False]
    ranks = {content.prefix_hash: content.rank for content in contents if content.prefix_hash}
    assert sorted(ranks.values()) == [0, 1, 2, 3]
    assert ranks[c] < min(ranks[b], ranks[other]) < max(ranks[b], ranks[other]) < ranks[a]
    assert len(stamps.contents(at_least=0)) == 6
    stamps.close()
