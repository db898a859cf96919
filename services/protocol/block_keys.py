"""Block keys: identify the blocks of a group by their content, from its tokens alone.

    sequence 0   | h0 | h1 | h2 : |           trunk      h0 h1       full blocks of all sequences
    sequence 1   | h0 | h1 | h3 | h4 |        branches   h2          the blocks of each sequence
    sequence 2   | h0 | h1 | h3 | h5 : |                 h3 h4       after the trunk; the last one
                                                         h3 h5       need not be full

The *key* of a block is the hash of its tokens and of all tokens before them. The key of a full
block is its prefix hash, which the prefix index knows. Blocks with equal keys are one block.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, takewhile
from typing import TypeVar

from blockstore.hashing import next_hash, prefix_hashes
from blockstore.records import PrefixHash
from services.pool.allotment import blocks_at_admission
from services.pool.stamps import Stamps
from services.protocol.ticket import Ticket

T = TypeVar("T")

Key = PrefixHash


@dataclass(frozen=True, slots=True)
class ComputedBlocks:
    """The leading blocks of a sequence that have KV already, of its first `num_tokens` tokens. The
    first `num_full` blocks are finished and never written again."""

    block_ids: tuple[int, ...] = ()
    num_tokens: int = 0
    num_full: int = 0

    @classmethod
    def of_full(cls, block_ids: Sequence[int], block_size: int) -> "ComputedBlocks":
        return cls(tuple(block_ids), len(block_ids) * block_size, len(block_ids))


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """Consecutive blocks of tokens. Only the last block may be unfinished."""

    parent: Key
    """The key of the block before them."""
    token_ids: tuple[int, ...]
    hashes: tuple[PrefixHash, ...]
    """The hashes of the full blocks."""
    block_size: int

    @classmethod
    def of(cls, parent: Key, token_ids: tuple[int, ...], block_size: int) -> "BlockSpan":
        return cls(parent, token_ids, prefix_hashes(parent, token_ids, block_size), block_size)

    @property
    def last(self) -> Key:
        """The key of its last full block, or `parent` if it has none."""
        return self.hashes[-1] if self.hashes else self.parent

    @property
    def keys(self) -> tuple[Key, ...]:
        tail = self.tokens_of(len(self.hashes))
        return (*self.hashes, next_hash(self.last, tail)) if tail else self.hashes

    def tokens_of(self, number: int) -> tuple[int, ...]:
        return self.token_ids[number * self.block_size : (number + 1) * self.block_size]

    def first_mismatch(self, stamps: Stamps, found: Mapping[Key, int]) -> Key | None:
        """Compare the stamps of the leading full blocks that were `found` (key -> block id) with
        this span's tokens. Returns the key of the first block that does not match, or None."""
        hashes = _leading(self.hashes, found)
        tokens = self.token_ids[: len(hashes) * self.block_size]
        block_ids = [found[key] for key in hashes]
        number = stamps.first_mismatch(block_ids, self.parent, hashes, tokens)
        return None if number is None else hashes[number]

    def stamp(self, stamps: Stamps, blocks: Mapping[Key, int]) -> None:
        """Stamp the full blocks of this span that are among `blocks`."""
        parent = self.parent
        for number, key in enumerate(self.hashes):
            if key in blocks:
                stamps.complete(blocks[key], key, parent, self.tokens_of(number))
            parent = key


@dataclass(frozen=True, slots=True)
class BlockKeys:
    """The keys of all blocks of a group."""

    trunk: BlockSpan
    """The full blocks that all sequences have."""
    branches: tuple[BlockSpan, ...]
    """The blocks of each sequence after the trunk, in the order of the ticket."""

    @classmethod
    def of(cls, ticket: Ticket, block_size: int, num_left_out: int = 0) -> "BlockKeys":
        """The block keys of a ticket's sequences, each without its last `num_left_out` tokens."""
        prompt = ticket.prompt_token_ids
        shared = prompt + common_prefix([state.token_ids for state in ticket.sequences])
        shortest = min(len(state.token_ids) for state in ticket.sequences)
        num_shared = min(len(shared), len(prompt) + shortest - num_left_out)
        num_shared -= num_shared % block_size
        trunk = BlockSpan.of(ticket.root_hash, shared[:num_shared], block_size)
        own_from = max(0, num_shared - len(prompt))
        branches = []
        for state in ticket.sequences:
            own = (*prompt[num_shared:], *state.token_ids[own_from:])
            branches.append(BlockSpan.of(trunk.last, own[: len(own) - num_left_out], block_size))
        return cls(trunk, tuple(branches))

    @property
    def chains(self) -> tuple[tuple[PrefixHash, ...], tuple[tuple[PrefixHash, ...], ...]]:
        """The prefix hashes of the trunk, and of each branch, or () if no branch has a full block:
        the prefixes that `BlockStore.allocate` looks up."""
        behind = tuple(branch.hashes for branch in self.branches)
        return self.trunk.hashes, behind if any(behind) else ()

    @property
    def spans(self) -> tuple[BlockSpan, ...]:
        return self.trunk, *self.branches

    def keys_of(self, number: int) -> tuple[Key, ...]:
        """Return the keys of all blocks of the sequence at place `number` of the ticket."""
        return self.trunk.keys + self.branches[number].keys

    def computed_blocks(self, found: Mapping[Key, int]) -> list[ComputedBlocks]:
        """For each sequence, the leading full blocks that were `found` (key -> block id)."""
        trunk = _leading(self.trunk.hashes, found)
        is_whole = len(trunk) == len(self.trunk.hashes)
        own = (_leading(one.hashes, found) if is_whole else [] for one in self.branches)
        size = self.trunk.block_size
        return [
            ComputedBlocks.of_full([found[key] for key in (*trunk, *keys)], size) for keys in own
        ]

    def computed_with_copies(
        self,
        found: Mapping[Key, int],
        computed: "BlockKeys",
        sources: Collection[Key],
        new_block_ids: Sequence[int],
    ) -> tuple[list[ComputedBlocks], dict[Key, int]]:
        """Extend what was `found` in the cache by blocks to copy back from a swap pool.

        `computed` has the keys of this group without each sequence's last token, because the swap
        pool does not have its KV. `sources` are the keys of blocks that can be copied. After its
        cached blocks, each sequence gets a block of `new_block_ids` for each next key, until a key
        is not in `sources` or no new block is left; sequences share the blocks of equal keys.
        Returns the leading blocks of each sequence, and the new block of each key to copy.
        """
        new, copied = iter(new_block_ids), dict[Key, int]()
        extended: list[ComputedBlocks] = []
        for number, cached in enumerate(self.computed_blocks(found)):
            block_ids = list(cached.block_ids)
            for key in computed.keys_of(number)[len(block_ids) :]:
                if key not in copied:
                    target = next(new, None) if key in sources else None
                    if target is None:
                        break
                    copied[key] = target
                block_ids.append(copied[key])
            is_more = len(block_ids) > len(cached.block_ids)
            extended.append(computed._with_kv(number, block_ids) if is_more else cached)
        return extended, copied

    def _with_kv(self, number: int, block_ids: Sequence[int]) -> ComputedBlocks:
        """The leading blocks `block_ids` of sequence `number`, with KV in every slot it uses."""
        size = self.trunk.block_size
        num_tokens = len(self.trunk.token_ids) + len(self.branches[number].token_ids)
        num_tokens = min(len(block_ids) * size, num_tokens)
        return ComputedBlocks(tuple(block_ids), num_tokens, num_tokens // size)

    def full_among(self, blocks: Mapping[Key, int]) -> tuple[tuple[int, PrefixHash], ...]:
        """(block id, prefix hash) of each full block among `blocks`."""
        hashes = set(chain.from_iterable(span.hashes for span in self.spans))
        return tuple((block_id, key) for key, block_id in blocks.items() if key in hashes)

    @property
    def tails(self) -> Iterator[Key]:
        """The keys of unfinished last blocks."""
        return (span.keys[-1] for span in self.branches if len(span.keys) > len(span.hashes))

    def blocks(self, tables: Sequence[Sequence[int]]) -> dict[Key, int]:
        """Maps each key to the first block in the sequences' block tables that has it."""
        num_shared = len(self.trunk.hashes)
        found = dict(zip(self.trunk.hashes, tables[0], strict=False))
        for branch, table in zip(self.branches, tables, strict=True):
            for key, block_id in zip(branch.keys, table[num_shared:], strict=False):
                found.setdefault(key, block_id)
        return found

    def first_mismatch(self, stamps: Stamps, found: Mapping[Key, int]) -> Key | None:
        """The key of a `found` full block whose stamp does not match (law 6), or None."""
        wrong_keys = (span.first_mismatch(stamps, found) for span in self.spans)
        return next((key for key in wrong_keys if key is not None), None)


def common_prefix(sequences: Sequence[tuple[T, ...]]) -> tuple[T, ...]:
    """The longest common prefix."""
    first, last = min(sequences), max(sequences)  # in lexical order all others are between these
    pairs = enumerate(zip(first, last, strict=False))
    num_same = next((i for i, (a, b) in pairs if a != b), min(len(first), len(last)))
    return first[:num_same]


def num_tokens_of(ticket: Ticket) -> int:
    """How many tokens a group computes; tokens that several sequences begin with count once."""
    num_prompt, num_shared = len(ticket.prompt_token_ids), _num_shared(ticket)
    lengths = (num_prompt + len(state.token_ids) for state in ticket.sequences)
    return sum(lengths) - sum(num_prompt + number for number in num_shared)


def num_blocks_for(ticket: Ticket, block_size: int) -> int:
    """How many blocks a group needs to compute its tokens and one more of each sequence. Full
    blocks that several sequences begin with count once, all others once per sequence."""
    num_prompt, num_shared = len(ticket.prompt_token_ids), _num_shared(ticket)
    lengths = (num_prompt + len(state.token_ids) for state in ticket.sequences)
    num_blocks = sum(blocks_at_admission(length, block_size) for length in lengths)
    return num_blocks - sum((num_prompt + number) // block_size for number in num_shared)


def _num_shared(ticket: Ticket) -> list[int]:
    """For each sequence but one, how many leading generated tokens it shares with the one before it
    in lexical order, where sequences with a common beginning are neighbours."""
    generated = sorted(state.token_ids for state in ticket.sequences)
    return [len(common_prefix(pair)) for pair in pairwise(generated)]


def _leading(keys: Sequence[Key], found: Mapping[Key, int]) -> list[Key]:
    return list(takewhile(found.__contains__, keys))
