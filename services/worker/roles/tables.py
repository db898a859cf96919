"""Checks a ticket's block tables before its claim (law 4); finds the blocks that are in no table.

See ADR 65.
"""

from itertools import chain

from blockstore.records import Claim, PoolSpec
from services.pool.stamps import Stamps
from services.protocol.ticket import Ticket, TicketSequence
from services.runtime.errors import InvalidRequest

_Place = tuple[int, int | None, tuple[int, ...]]
"""The place of a block, equal for all sequences that share the block: its number in the block
table, the id of the block before it (None: there is none), and the computed tokens in it."""


def check_detached(ticket: Ticket, spec: PoolSpec, num_slots: int) -> None:
    """Raises InvalidRequest unless a worker on the pool of `spec` can continue this detached ticket
    of the same pool in `num_slots` decode slots."""
    if ticket.width > num_slots:
        raise InvalidRequest(f"{ticket.width} sequences for {num_slots} slots")
    for sequence in ticket.sequences:
        # All tokens but the last are computed: otherwise this worker would write into earlier
        # blocks, which others read.
        length = len(ticket.prompt_token_ids) + len(sequence.token_ids)
        if sequence.num_computed_tokens != length - 1:
            raise InvalidRequest(f"{sequence.num_computed_tokens} of {length} tokens are computed")
    check_tables(ticket, spec)


def check_tables(ticket: Ticket, spec: PoolSpec) -> None:
    """Raises InvalidRequest unless the block tables of a sequence group are consistent.

    Sequences that share a block share all blocks before it, with the same tokens, and have computed
    the same tokens of it. No two sequences share a block without computed tokens.

        sequence 0   |  b0 |  b1 |  b2 :   |        full blocks: shared while the tokens are equal
        sequence 1   |  b0 |  b1 |  b2 :   |        tail b2: shared until 0 or 1 writes into it
        sequence 2   |  b0 |  b1 |  b3 : |  b4 |
    """
    for sequence in ticket.sequences:
        _check_table(sequence, ticket.pool_id, spec)
    if len(ticket.sequences) == 1:
        return
    first, size = ticket.sequences[0], spec.block_size
    num_full = len(ticket.prompt_token_ids) // size
    common = first.block_ids[:num_full]  # in every sequence these blocks hold the prompt's tokens
    places: dict[int, _Place] = {}
    for sequence in ticket.sequences:
        begin = num_full if sequence.block_ids[:num_full] == common else 0
        for block_id, place in _places(ticket, sequence, size, begin):
            if places.setdefault(block_id, place) != place:
                raise InvalidRequest(f"the sequences do not agree on block {block_id}")
    if not places.keys().isdisjoint(common):
        raise InvalidRequest("a block of the prompt is also elsewhere in a table")


def _check_table(sequence: TicketSequence, pool_id: str, spec: PoolSpec) -> None:
    block_ids, num_computed = sequence.block_ids, sequence.num_computed_tokens
    num_slots = len(block_ids) * spec.block_size
    # A sequence that was detached while it waited for a block has no slot for its last token yet.
    if num_slots < max(num_computed, 1) or max(block_ids) >= spec.num_blocks:
        raise InvalidRequest(
            f"{num_slots} slots in pool {pool_id} for {num_computed} computed tokens"
        )
    if len(set(block_ids)) < len(block_ids):
        raise InvalidRequest(f"sequence {sequence.index} has a block in two places")


def _places(
    ticket: Ticket, sequence: TicketSequence, size: int, begin: int
) -> list[tuple[int, _Place]]:
    """The places of the blocks from number `begin` on. The place of a block without computed tokens
    contains the sequence's index instead, so that it equals no other sequence's place."""
    tokens = (*ticket.prompt_token_ids, *sequence.token_ids)[: sequence.num_computed_tokens]
    before = (None, *sequence.block_ids)
    only_here = (-1 - sequence.index,)
    return [
        (block_id, (n, before[n], tokens[n * size : (n + 1) * size] or only_here))
        for n, block_id in enumerate(sequence.block_ids[begin:], begin)
    ]


def blocks_in_no_table(
    ticket: Ticket, claim: Claim, stamps: Stamps
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The blocks of a claimed holder that are in no block table of its ticket: (spare, finished).

    Spare blocks may be written: they are for copy-on-write, or the store granted them while the
    holder was being detached. Finished blocks are committed, and others may read them.
    """
    in_tables = set(chain.from_iterable(sequence.block_ids for sequence in ticket.sequences))
    others = [block_id for block_id in claim.block_ids if block_id not in in_tables]
    finished = {block_id for block_id in others if stamps.is_committed(block_id)}
    spare = tuple(block_id for block_id in others if block_id not in finished)
    return spare, tuple(finished)
