"""Copies what gives way to the colder pool, behind the back of the step loop."""

import asyncio
from collections.abc import Callable, Iterable
from itertools import chain
from typing import NoReturn

from services.decode.job import Job
from services.engine.sequences.block_keys import num_tokens_of
from services.protocol.ticket import Swapped, Ticket
from services.worker.swap.pool import SwapPool


class Swapping:
    """One after another. `on_copied(job, swapped)`: where its KV is now, too; None: nowhere else,
    the colder pool has no room."""

    def __init__(
        self, swap_pool: SwapPool, on_copied: Callable[[Job, Swapped | None], None]
    ) -> None:
        self._swap_pool = swap_pool
        self._on_copied = on_copied
        self._jobs: asyncio.Queue[Job] = asyncio.Queue()

    def begin(self, job: Job) -> None:
        """No step touches its blocks, and nothing will until `on_copied`."""
        self._jobs.put_nowait(job)

    async def run(self) -> NoReturn:
        while True:
            job = await self._jobs.get()
            assert job.ticket is not None
            self._on_copied(job, await self._swap_pool.put(job.ticket))

    def is_worthwhile(self, ticket: Ticket, others: Iterable[Ticket]) -> bool:
        """Whether to copy what its sequences have, or to let it be computed again. What is lost are
        the blocks that they alone have: others are short of them right now. Those that they share
        with somebody who goes on stay where they are."""
        size = self._swap_pool.spec.block_size
        own = _blocks_with_kv(ticket, size)
        for other in others:
            own.difference_update(*(state.block_ids for state in other.sequences))
        num_computed = num_tokens_of(ticket) - len(ticket.sequences)
        num_tokens = min(len(own) * size, num_computed)
        return self._swap_pool.is_worthwhile(len(own), num_tokens, ticket.prefill_ns_per_token)


def _blocks_with_kv(ticket: Ticket, block_size: int) -> set[int]:
    """Each once, whoever shares it."""
    tables = (
        state.block_ids[: -(-state.num_computed_tokens // block_size)] for state in ticket.sequences
    )
    return set(chain.from_iterable(tables))
