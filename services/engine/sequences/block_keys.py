"""What the blocks of a group hold, known from its tokens alone: equal beginnings are one block.

    sequence 0   | h0 | h1 | h2 : |           trunk      h0 h1       full ones that all have
    sequence 1   | h0 | h1 | h3 | h4 |        branches   h2          what each has behind them; the
    sequence 2   | h0 | h1 | h3 | h5 : |                 h3 h4       last of each may not be full
                                                         h3 h5

A block is known by its *key*: the hash of its tokens and of all before them. A full one's is its
prefix hash, by which it is found in a pool.

See ADR 84.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, takewhile

from blockstore.hashing import next_hash, prefix_hashes
from blockstore.records import PrefixHash
from services.common.pool.allotment import blocks_to_begin
from services.engine.sequences.sequence import Stamps, common
from services.protocol.ticket import Ticket

Key = PrefixHash
Complete = Callable[[int, PrefixHash, PrefixHash, Sequence[int]], None]
"""Writes what a block holds: its id, its hash, its parent's, its token ids."""


@dataclass(frozen=True, slots=True)
class Begun:
    """Leading blocks of a sequence in which there is KV already, of `num_tokens` tokens; the first
    `num_full` of them are finished, and never written again."""

    block_ids: tuple[int, ...] = ()
    num_tokens: int = 0
    num_full: int = 0

    @classmethod
    def of_full(cls, block_ids: Sequence[int], block_size: int) -> "Begun":
        return cls(tuple(block_ids), len(block_ids) * block_size, len(block_ids))


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks in a row behind the one of key `parent`: all tokens in them, and the `hashes` of those
    that are full, all but perhaps the last."""

    parent: Key
    token_ids: tuple[int, ...]
    hashes: tuple[PrefixHash, ...]
    block_size: int

    @classmethod
    def of(cls, parent: Key, token_ids: tuple[int, ...], block_size: int) -> "Run":
        return cls(parent, token_ids, prefix_hashes(parent, token_ids, block_size), block_size)

    @property
    def last(self) -> Key:
        """Of its last full block."""
        return self.hashes[-1] if self.hashes else self.parent

    @property
    def keys(self) -> tuple[Key, ...]:
        tail = self.tokens_of(len(self.hashes))
        return (*self.hashes, next_hash(self.last, tail)) if tail else self.hashes

    def tokens_of(self, number: int) -> tuple[int, ...]:
        return self.token_ids[number * self.block_size : (number + 1) * self.block_size]

    def first_wrong(self, stamps: Stamps, found: Mapping[Key, int]) -> Key | None:
        """Of those of its leading full blocks that were `found`, the first that says something
        else."""
        hashes = _leading(self.hashes, found)
        tokens = self.token_ids[: len(hashes) * self.block_size]
        block_ids = [found[key] for key in hashes]
        wrong = stamps.first_mismatch(block_ids, self.parent, hashes, tokens)
        return None if wrong is None else hashes[wrong]

    def stamp(self, complete: Complete, blocks: Mapping[Key, int]) -> None:
        """Let each of `blocks` that is full say what it holds."""
        parent = self.parent
        for number, key in enumerate(self.hashes):
            if key in blocks:
                complete(blocks[key], key, parent, self.tokens_of(number))
            parent = key


@dataclass(frozen=True, slots=True)
class BlockKeys:
    """`trunk`: full blocks that all sequences have; `branches`: of each what is behind them."""

    trunk: Run
    branches: tuple[Run, ...]

    @classmethod
    def of(cls, ticket: Ticket, block_size: int, num_left_out: int = 0) -> "BlockKeys":
        """Of all tokens of each sequence, but the last `num_left_out`."""
        prompt, shared = ticket.prompt_token_ids, shared_tokens(ticket)
        shortest = min(len(state.token_ids) for state in ticket.sequences)
        num_shared = min(len(shared), len(prompt) + shortest - num_left_out)
        num_shared -= num_shared % block_size
        trunk = Run.of(ticket.root_hash, shared[:num_shared], block_size)
        own_from = max(0, num_shared - len(prompt))
        branches = []
        for state in ticket.sequences:
            own = (*prompt[num_shared:], *state.token_ids[own_from:])
            branches.append(Run.of(trunk.last, own[: len(own) - num_left_out], block_size))
        return cls(trunk, tuple(branches))

    @property
    def chains(self) -> tuple[tuple[PrefixHash, ...], tuple[tuple[PrefixHash, ...], ...]]:
        """Of full blocks: what all have, and behind it what each has; as a store looks for them."""
        behind = tuple(branch.hashes for branch in self.branches)
        return self.trunk.hashes, behind if any(behind) else ()

    @property
    def runs(self) -> tuple[Run, ...]:
        return self.trunk, *self.branches

    def keys_of(self, number: int) -> tuple[Key, ...]:
        """Of all blocks of the sequence at this place."""
        return self.trunk.keys + self.branches[number].keys

    def begun(self, found: Mapping[Key, int]) -> list[Begun]:
        """How far each sequence comes with the full blocks that were `found`."""
        trunk = _leading(self.trunk.hashes, found)
        is_whole = len(trunk) == len(self.trunk.hashes)
        ways = (_leading(one.hashes, found) if is_whole else [] for one in self.branches)
        size = self.trunk.block_size
        return [Begun.of_full([found[key] for key in (*trunk, *way)], size) for way in ways]

    def begun_with(
        self,
        found: Mapping[Key, int],
        computed: "BlockKeys",
        sources: Collection[Key],
        new_block_ids: Sequence[int],
    ) -> tuple[list[Begun], dict[Key, int]]:
        """The same, and behind that with what there are `sources` for among `computed`, contents
        but for each one's last token; and where that is to be copied to, of `new_block_ids`."""
        new, copied = iter(new_block_ids), dict[Key, int]()
        begun: list[Begun] = []
        for number, where in enumerate(self.begun(found)):
            block_ids = list(where.block_ids)
            for key in computed.keys_of(number)[len(block_ids) :]:
                if key not in copied:
                    target = next(new, None) if key in sources else None
                    if target is None:
                        break
                    copied[key] = target
                block_ids.append(copied[key])
            is_more = len(block_ids) > len(where.block_ids)
            begun.append(computed._begun(number, block_ids) if is_more else where)
        return begun, copied

    def _begun(self, number: int, block_ids: Sequence[int]) -> Begun:
        """With all of its tokens that have a slot in these."""
        size = self.trunk.block_size
        num_tokens = len(self.trunk.token_ids) + len(self.branches[number].token_ids)
        num_tokens = min(len(block_ids) * size, num_tokens)
        return Begun(tuple(block_ids), num_tokens, num_tokens // size)

    def full_among(self, blocks: Mapping[Key, int]) -> tuple[tuple[int, PrefixHash], ...]:
        """Those that have a prefix hash."""
        hashes = set(chain.from_iterable(run.hashes for run in self.runs))
        return tuple((block_id, key) for key, block_id in blocks.items() if key in hashes)

    @property
    def tails(self) -> Iterator[Key]:
        """The keys of last blocks that are not full."""
        return (run.keys[-1] for run in self.branches if len(run.keys) > len(run.hashes))

    def blocks(self, tables: Sequence[Sequence[int]]) -> dict[Key, int]:
        """Where what the sequences hold stands, by their block tables; of equals the first."""
        num_shared = len(self.trunk.hashes)
        found = dict(zip(self.trunk.hashes, tables[0], strict=False))
        for branch, table in zip(self.branches, tables, strict=True):
            for key, block_id in zip(branch.keys, table[num_shared:], strict=False):
                found.setdefault(key, block_id)
        return found

    def first_wrong(self, stamps: Stamps, found: Mapping[Key, int]) -> Key | None:
        """A full block, of those that were `found`, that does not say what it should (law 6)."""
        wrong = (run.first_wrong(stamps, found) for run in self.runs)
        return next((key for key in wrong if key is not None), None)


def shared_tokens(ticket: Ticket) -> tuple[int, ...]:
    """With which all sequences of a group begin: the prompt, at least."""
    return ticket.prompt_token_ids + common([state.token_ids for state in ticket.sequences])


def num_tokens_of(ticket: Ticket) -> int:
    """To compute in all: what several sequences begin with once."""
    num_prompt, num_shared = len(ticket.prompt_token_ids), _num_shared(ticket)
    lengths = (num_prompt + len(state.token_ids) for state in ticket.sequences)
    return sum(lengths) - sum(num_prompt + number for number in num_shared)


def num_blocks_for(ticket: Ticket, block_size: int) -> int:
    """To compute a group's tokens, and one more of each sequence: full blocks of what several begin
    with once, the rest for each."""
    num_prompt, num_shared = len(ticket.prompt_token_ids), _num_shared(ticket)
    lengths = (num_prompt + len(state.token_ids) for state in ticket.sequences)
    num_blocks = sum(blocks_to_begin(length, block_size) for length in lengths)
    return num_blocks - sum((num_prompt + number) // block_size for number in num_shared)


def _num_shared(ticket: Ticket) -> list[int]:
    """For each sequence but one, how many of its own tokens another one has that is counted before:
    in the order of a dictionary, who begins alike stands side by side."""
    ways = sorted(state.token_ids for state in ticket.sequences)
    return [len(common(pair)) for pair in pairwise(ways)]


def _leading(keys: Sequence[Key], found: Mapping[Key, int]) -> list[Key]:
    return list(takewhile(found.__contains__, keys))
