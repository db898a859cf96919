"""Copies the KV of a request to another pool before it goes on there."""

import asyncio
from collections.abc import Awaitable, Callable

from services.gateway.identity import client_id
from services.gateway.workers.lease import DetachedTicket
from services.protocol.ticket import Ticket
from services.runtime.errors import QuireError
from services.runtime.logging import get_logger

log = get_logger(__name__)

Pull = Callable[[Ticket, str, str], Awaitable[DetachedTicket | None]]
"""Copies a ticket's KV from the pool of the first id to the pool of the second; see
`services.gateway.workers.movers`."""


class Pulling:
    """The pull of one request, in a task; one at a time."""

    def __init__(self, pull: Pull) -> None:
        self._pull = pull
        self._task: asyncio.Task[None] | None = None

    def begin(
        self,
        ticket: Ticket,
        source_pool_id: str,
        target_pool_id: str,
        then: Callable[[DetachedTicket | None], None],
        on_failure: Callable[[str], None],
    ) -> None:
        """Call `then` with the copied ticket, or with None if only a prefix was copied; or call
        `on_failure` with the reason."""

        async def run() -> None:
            try:
                then(await self._pull(ticket, source_pool_id, target_pool_id))
            except Exception as error:  # our own fault must not leave the request without attempt
                log.warning(
                    "pull_failed",
                    request_id=client_id(ticket.request_id),
                    source=source_pool_id,
                    target=target_pool_id,
                    reason=str(error),
                    exc_info=None if isinstance(error, QuireError) else error,
                )
                on_failure(str(error))

        self._task = asyncio.create_task(run(), name=f"pull {ticket.request_id}")

    def cancel(self) -> None:
        """End the pull in progress; none of its callbacks is called."""
        task, self._task = self._task, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()
