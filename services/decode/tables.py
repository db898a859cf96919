"""The block tables of a ticket, before anybody believes them (law 4), and what is in none.

See ADR 65.
"""

from itertools import chain

from blockstore.records import Claim, PoolSpec
from services.common.errors import InvalidRequest
from services.engine.engine import BlockStamps
from services.protocol.ticket import Ticket, TicketSequence

_Place = tuple[int, int | None, tuple[int, ...]]
"""Of a block: its number in a table, the block before it, and the tokens in it that are
computed."""


def check_at_rest(ticket: Ticket, spec: PoolSpec, num_slots: int) -> None:
    """That a worker on this pool, with so many slots for it, can go on with it. InvalidRequest."""
    if ticket.pool_id != spec.pool_id:
        raise InvalidRequest(f"this worker is on pool {spec.pool_id}, not {ticket.pool_id}")
    if ticket.width > num_slots:
        raise InvalidRequest(f"{ticket.width} sequences for {num_slots} slots")
    for sequence in ticket.sequences:  # others read the blocks before its last
        length = len(ticket.prompt_token_ids) + len(sequence.token_ids)
        if sequence.num_computed_tokens != length - 1:
            raise InvalidRequest(f"{sequence.num_computed_tokens} of {length} tokens are computed")
    check_tables(ticket, spec)


def check_tables(ticket: Ticket, spec: PoolSpec) -> None:
    """That the tables of a group go together: who shares a block shares all before it, with the
    same tokens in them, and has computed as much of it; nobody shares an empty one. InvalidRequest.

        sequence 0   |  b0 |  b1 |  b2 :   |        what is full is shared by who began alike,
        sequence 1   |  b0 |  b1 |  b2 :   |        a tail by who has not written in it yet
        sequence 2   |  b0 |  b1 |  b3 : |  b4 |
    """
    for sequence in ticket.sequences:
        _check_table(sequence, ticket.pool_id, spec)
    if len(ticket.sequences) == 1:
        return
    first, size = ticket.sequences[0], spec.block_size
    num_full = len(ticket.prompt_token_ids) // size
    common = first.block_ids[:num_full]  # their tokens are the prompt's, in all sequences
    places: dict[int, _Place] = {}
    for sequence in ticket.sequences:
        begin = num_full if sequence.block_ids[:num_full] == common else 0
        for block_id, place in _places(ticket, sequence, size, begin):
            if places.setdefault(block_id, place) != place:
                raise InvalidRequest(f"the sequences do not agree on block {block_id}")
    if not places.keys().isdisjoint(common):
        raise InvalidRequest("a block of the prompt stands elsewhere, too")


def _check_table(sequence: TicketSequence, pool_id: str, spec: PoolSpec) -> None:
    block_ids, num_computed = sequence.block_ids, sequence.num_computed_tokens
    num_slots = len(block_ids) * spec.block_size
    # Who came to rest while it waited for its next block has no slot for its last token yet.
    if num_slots < max(num_computed, 1) or max(block_ids) >= spec.num_blocks:
        raise InvalidRequest(
            f"{num_slots} slots in pool {pool_id} for {num_computed} computed tokens"
        )
    if len(set(block_ids)) < len(block_ids):
        raise InvalidRequest(f"sequence {sequence.index} has a block in two places")


def _places(
    ticket: Ticket, sequence: TicketSequence, size: int, begin: int
) -> list[tuple[int, _Place]]:
    """Of the blocks from number `begin` on. An empty one is its sequence's alone: it says so."""
    tokens = (*ticket.prompt_token_ids, *sequence.token_ids)[: sequence.num_computed_tokens]
    before = (None, *sequence.block_ids)
    nobody_elses = (-1 - sequence.index,)
    return [
        (block_id, (n, before[n], tokens[n * size : (n + 1) * size] or nobody_elses))
        for n, block_id in enumerate(sequence.block_ids[begin:], begin)
    ]


def in_no_table(
    ticket: Ticket, claim: Claim, stamps: BlockStamps
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the holder has beside its ticket: blocks to write into (copies of a tail to come; what
    was given out when it came to rest), and finished ones, which others may read."""
    in_tables = set(chain.from_iterable(sequence.block_ids for sequence in ticket.sequences))
    others = [block_id for block_id in claim.block_ids if block_id not in in_tables]
    finished = {block_id for block_id in others if stamps.is_committed(block_id)}
    spare = tuple(block_id for block_id in others if block_id not in finished)
    return spare, tuple(finished)
