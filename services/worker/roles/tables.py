"""Checks the length of a ticket's block tables before its claim; finds the blocks that are in no
table. The claim and the stamps check the blocks themselves.
"""

from itertools import chain

from blockstore.records import Claim, PoolSpec
from services.pool.stamps import Stamps
from services.protocol.ticket import Ticket
from services.runtime.errors import InvalidRequest


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
        num_places = len(sequence.block_ids) * spec.block_size
        # A sequence that was detached while it waited for a block has no slot for its last token.
        if num_places < max(length - 1, 1) or max(sequence.block_ids) >= spec.num_blocks:
            raise InvalidRequest(f"{num_places} slots in the pool for {length - 1} tokens")


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
