"""Finds the blocks of a claimed ticket that are in no block table."""

from itertools import chain

from blockstore.records import Claim
from services.pool.stamps import Stamps
from services.protocol.ticket import Ticket


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
