"""The keys of a group's blocks, by their tokens: blocks of 4."""

from collections.abc import Sequence

import pytest

from blockstore.hashing import next_hash, prefix_hashes
from services.protocol.block_keys import BlockKeys, ComputedBlocks
from services.protocol.ticket import Ticket, TicketSequence

from .fakes import PROMPT, ticket

ROOT = bytes(16)
SIZE = 4


def group(*own: Sequence[int], prompt: Sequence[int] = PROMPT) -> Ticket:
    states = tuple(TicketSequence(i, tuple(tokens)) for i, tokens in enumerate(own))
    return ticket("r1", prompt, sequences=states)


def hashes(tokens: Sequence[int]) -> tuple[bytes, ...]:
    return prefix_hashes(ROOT, tokens, SIZE)


def test_a_lone_sequence_is_a_trunk_and_a_tail() -> None:
    contents = BlockKeys.of(group((1, 2, 3)), SIZE)
    tokens = (*PROMPT, 1, 2, 3)
    assert contents.chains == (hashes(tokens), ())
    assert contents.keys_of(0) == (*hashes(tokens), next_hash(hashes(tokens)[-1], (3,)))


def test_keys_of_sequences_follow_the_common_ones() -> None:
    """10 tokens of prompt: 2 blocks are common to all, then each sequence has its own."""
    own = [(1, 2, 3, 4, 5, 6), (1, 2, 9), (7,)]
    contents = BlockKeys.of(group(*own), SIZE)
    trunk, branches = contents.chains
    assert trunk == hashes(PROMPT[:8])
    assert branches == tuple(hashes((*PROMPT, *tokens))[2:] for tokens in own)
    assert [len(branch) for branch in branches] == [2, 1, 0]
    assert branches[0][0] == branches[1][0]


def test_equal_contents_have_one_key() -> None:
    """Full or not, and beside a longer one."""
    alike = BlockKeys.of(group((1, 2, 3), (1, 2, 3), (1, 2, 3, 4)), SIZE)
    assert alike.keys_of(0) == alike.keys_of(1)
    assert alike.keys_of(0)[:3] == alike.keys_of(2)[:3]
    assert alike.keys_of(0)[3] != alike.keys_of(2)[3]


@pytest.mark.parametrize("num_own", range(6))
def test_without_the_last_token(num_own: int) -> None:
    """A sequence whose tokens begin its sibling's has one full block less."""
    long, short = tuple(range(1, 7)), tuple(range(1, 1 + num_own))
    computed = BlockKeys.of(group(long, short), SIZE, num_left_out=1)
    for number, own in enumerate((long, short)):
        tokens = (*PROMPT, *own)[:-1]
        full = len(tokens) // SIZE
        keys = computed.keys_of(number)
        assert keys[:full] == hashes(tokens)
        assert len(keys) == -(-len(tokens) // SIZE)


def test_equal_contents_are_one_block_wherever_they_stand() -> None:
    """Sequences 0 and 1 have computed the same block twice; that of the first counts."""
    contents = BlockKeys.of(group((1, 2, 3), (1, 2, 3), (4, 5, 6)), SIZE)
    tables = [(0, 1, 2, 3), (0, 1, 4, 5), (0, 1, 6, 7)]
    assert list(contents.blocks(tables).values()) == [0, 1, 2, 3, 6, 7]


def test_each_sequence_begins_after_its_cached_blocks() -> None:
    contents = BlockKeys.of(group((1, 2, 3, 4, 5, 6), (1, 2), (7, 8, 9)), SIZE)
    (h0, h1), (of_0, of_1, of_2) = contents.chains
    assert of_1 == of_0[:1]
    assert contents.computed_blocks({h0: 5}) == [ComputedBlocks((5,), 4, 1)] * 3
    found = {h0: 5, h1: 6, of_0[0]: 7, of_0[1]: 8}
    assert contents.computed_blocks(found) == [
        ComputedBlocks((5, 6, 7, 8), 16, 4),
        ComputedBlocks((5, 6, 7), 12, 3),
        ComputedBlocks((5, 6), 8, 2),
    ]
    assert contents.computed_blocks({h1: 6, of_2[0]: 7}) == [ComputedBlocks()] * 3


def test_missing_blocks_are_copied_once() -> None:
    """Sequence 0 finds its own third block; 1 and 2 need theirs, and a common tail, from
    elsewhere."""
    asked = group((1, 2, 3, 4, 5), (7, 8, 9, 9), (7, 8, 9, 6))
    contents, computed = BlockKeys.of(asked, SIZE), BlockKeys.of(asked, SIZE, num_left_out=1)
    (h0, h1), (of_0, _, _) = contents.chains
    tables = [(10, 11, 12, 13), (10, 11, 14, 15), (10, 11, 14, 16)]
    sources = computed.blocks(tables)
    extended, copied = contents.computed_with_copies(
        {h0: 0, h1: 1, of_0[0]: 2}, computed, sources, [5, 6, 7, 8]
    )
    assert extended == [
        ComputedBlocks((0, 1, 2, 5), 14, 3),
        ComputedBlocks((0, 1, 6, 7), 13, 3),
        ComputedBlocks((0, 1, 6, 7), 13, 3),
    ]
    assert [sources[key] for key in copied] == [13, 14, 15]
    assert list(copied.values()) == [5, 6, 7]
    assert [block_id for block_id, _ in computed.full_among(copied)] == [6]


def test_a_missing_block_ends_the_lookup_of_all_its_sequences() -> None:
    asked = group((1, 2, 3, 4, 5, 6, 7), (1, 2, 9), (7, 8, 9))
    contents, computed = BlockKeys.of(asked, SIZE), BlockKeys.of(asked, SIZE, num_left_out=1)
    sources = computed.blocks([(0, 1, 2, 3), (0, 1, 2), (0, 1, 4)])
    del sources[computed.keys_of(1)[2]]
    extended, _ = contents.computed_with_copies({}, computed, sources, range(10, 20))
    assert [where.block_ids for where in extended] == [(10, 11), (10, 11), (10, 11, 12)]
    assert [where.num_tokens for where in extended] == [8, 8, 12]
