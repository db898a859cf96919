"""Copies sequences that give way to the colder pool, behind the back of the step loop."""

import asyncio
from collections.abc import Callable, Iterable
from typing import NoReturn

from services.common.ticket import Swapped, Ticket
from services.decode.job import Job
from services.worker.colder import ColderPool


class Swapping:
    """One after another. `on_copied(job, swapped)`: where its KV is now, too; None: nowhere else,
    the colder pool has no room."""

    def __init__(
        self, colder: ColderPool, on_copied: Callable[[Job, Swapped | None], None]
    ) -> None:
        self._colder = colder
        self._on_copied = on_copied
        self._jobs: asyncio.Queue[Job] = asyncio.Queue()

    def begin(self, job: Job) -> None:
        """No step touches its blocks, and nothing will until `on_copied`."""
        self._jobs.put_nowait(job)

    async def run(self) -> NoReturn:
        while True:
            job = await self._jobs.get()
            assert job.ticket is not None
            self._on_copied(job, await self._colder.put(job.ticket))

    def is_worthwhile(self, ticket: Ticket, others: Iterable[Ticket]) -> bool:
        """Whether to copy what a sequence has, or to let it be computed again. What is lost are the
        blocks that it alone has: others are short of them right now. Those that it shares with
        somebody who goes on stay where they are. Groups are computed again."""
        sequence, size = ticket.sequences[0], self._colder.spec.block_size
        if len(ticket.sequences) > 1 or not sequence.num_computed_tokens:
            return False
        own = set(sequence.block_ids[: -(-sequence.num_computed_tokens // size)])
        for other in others:
            own.difference_update(*(state.block_ids for state in other.sequences))
        num_tokens = min(len(own) * size, sequence.num_computed_tokens)
        return self._colder.is_worthwhile(len(own), num_tokens, ticket.prefill_ns_per_token)
