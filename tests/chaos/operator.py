"""An operator's requests to a deployment, sent to any gateway that answers, and its audits."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from quire.async_client import AsyncClient
from quire.errors import QuireError
from quire.reports import Pool
from tests.chaos.limits import AUDIT_S, RELEASE_S
from tests.waiting import until

ANSWER_LIMIT_S = 3.0
"""After this time the next gateway is called, since a gateway may be stopped."""

T = TypeVar("T")


class Operator:
    """`addresses`: the gateways' addresses for operations, separated by commas. Use it as a
    context."""

    def __init__(self, addresses: str) -> None:
        self._clients = [AsyncClient(address) for address in addresses.split(",")]
        self._num_faults = 0
        self._num_audited = 0
        self._changed = asyncio.Condition()

    async def call(
        self, method: Callable[[AsyncClient], Awaitable[T]], limit_s: float = ANSWER_LIMIT_S
    ) -> T | None:
        """The first answer of a gateway; None: no gateway answers now."""
        for client in tuple(self._clients):
            with suppress(QuireError, TimeoutError):
                async with asyncio.timeout(limit_s):
                    return await method(client)
            self._clients.remove(client)
            self._clients.append(client)
        return None

    async def close(self) -> None:
        for client in self._clients:
            await client.close()

    # ── audits, beside the faults ────────────────────────────────────────────────────────────────

    async def note_fault(self) -> None:
        """Count a fault. An audit that begins later covers it."""
        async with self._changed:
            self._num_faults += 1
            self._changed.notify_all()

    async def until_audited(self, max_pending: int) -> None:
        """Wait until at most `max_pending` faults still need an audit."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._num_faults - self._num_audited <= max_pending
            )

    async def audit_forever(self) -> None:
        """Audit without end. AssertionError: a law is broken. TimeoutError: a fault got no audit
        in time."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._num_faults > self._num_audited)
            number = self._num_faults
            await self._until_clean()
            async with self._changed:
                self._num_audited = number
                self._changed.notify_all()

    async def _until_clean(self) -> None:
        """Audit until no pool recovers: in a recovery, blocks have no state yet, and the audit does
        not count."""
        await until(self._is_clean, limit_s=AUDIT_S, explain=lambda: "no audit was clean")

    async def _is_clean(self) -> bool:
        audits = await self.call(AsyncClient.audit) or ()
        wrong = [audit for audit in audits if audit.violations]
        assert not any(audit.ledger_checked for audit in wrong), wrong
        return bool(audits) and not wrong and all(audit.ledger_checked for audit in audits)

    async def until_nothing_held(self, num_pools: int = 1) -> None:
        """Wait until at least `num_pools` pools exist and none holds a block. TimeoutError, with
        the pools: blocks are still held."""

        def nothing_held(pools: tuple[Pool, ...] | None) -> bool:
            pools = pools or ()
            return len(pools) >= num_pools and not any(pool.num_held for pool in pools)

        await until(
            lambda: self.call(AsyncClient.pools),
            nothing_held,
            limit_s=RELEASE_S,
            explain=lambda: "blocks are held although no request runs",
        )
