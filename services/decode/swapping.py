"""Copies the KV of preempted requests to the swap pool, beside the step loop."""

import asyncio
from collections.abc import Callable, Iterable
from itertools import chain
from typing import NoReturn

from services.common.runtime.logging import get_logger
from services.decode.job import Job, State, ticket_of
from services.protocol.block_keys import num_tokens_of
from services.protocol.ticket import Swapped, Ticket
from services.worker.swap.pool import SwapPool

log = get_logger(__name__)


class Swapping:
    """Copies one request at a time. `on_copied(job, swapped)` gets the place of the KV in the swap
    pool; `on_refused(job)` is called if the swap pool did not take it."""

    def __init__(
        self,
        swap_pool: SwapPool,
        on_copied: Callable[[Job, Swapped], None],
        on_refused: Callable[[Job], None],
    ) -> None:
        self._swap_pool = swap_pool
        self._on_copied = on_copied
        self._on_refused = on_refused
        self._jobs: asyncio.Queue[Job] = asyncio.Queue()

    def begin(self, job: Job, ticket: Ticket) -> None:
        """Queue a preempted job with this ticket. No step touches its blocks any more; the job
        keeps them until one of the two callbacks."""
        job.state, job.ending, job.ticket = State.SWAPPING, None, ticket
        self._jobs.put_nowait(job)

    async def run(self) -> NoReturn:
        while True:
            job = await self._jobs.get()
            swapped = await self._swap_pool.put(ticket_of(job))
            if swapped is not None:
                self._on_copied(job, swapped)
            else:
                log.info("swap_out_refused", holder_id=ticket_of(job).holder_id)
                self._on_refused(job)

    def is_worthwhile(self, ticket: Ticket, others: Iterable[Ticket]) -> bool:
        """Whether to copy the KV of a preempted request rather than compute it again.

        Only blocks that no other running request (`others`) shares count: they go to an earlier
        request at once. Shared blocks stay in the pool.
        """
        size = self._swap_pool.spec.block_size
        with_kv = (s.block_ids[: -(-s.num_computed_tokens // size)] for s in ticket.sequences)
        own = set(chain.from_iterable(with_kv))
        for other in others:
            own.difference_update(*(state.block_ids for state in other.sequences))
        num_computed = num_tokens_of(ticket) - len(ticket.sequences)
        num_tokens = min(len(own) * size, num_computed)
        return self._swap_pool.is_worthwhile(len(own), num_tokens, ticket.prefill_ns_per_token)
