"""An operator's requests to a deployment, sent to any gateway that answers, and its audits."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from quire.async_client import AsyncClient
from quire.errors import QuireError
from tests.chaos.limits import AUDIT_S, EMPTY_S

ANSWER_LIMIT_S = 3.0
"""After this time the next gateway is asked, since a gateway may be stopped."""

T = TypeVar("T")


class Operator:
    """`addresses`: the gateways' addresses for operations, separated by commas. Use it as a
    context."""

    def __init__(self, addresses: str) -> None:
        self._clients = [AsyncClient(address) for address in addresses.split(",")]
        self._num_happened = 0
        self._num_proven = 0
        self._news = asyncio.Condition()

    async def ask(self, question: Callable[[AsyncClient], Awaitable[T]]) -> T | None:
        """The first answer of a gateway; None: none answers now."""
        for client in tuple(self._clients):
            with suppress(QuireError, TimeoutError):
                async with asyncio.timeout(ANSWER_LIMIT_S):
                    return await question(client)
            self._clients.remove(client)
            self._clients.append(client)
        return None

    async def close(self) -> None:
        for client in self._clients:
            await client.close()

    # ── audits, beside what happens ──────────────────────────────────────────────────────────────

    async def happened(self) -> None:
        """Note an event. An audit that begins after it proves that it did no harm."""
        async with self._news:
            self._num_happened += 1
            self._news.notify_all()

    async def all_proven_but(self, number: int) -> None:
        """Wait until at most `number` events still need an audit."""
        async with self._news:
            await self._news.wait_for(lambda: self._num_happened - self._num_proven <= number)

    async def watch(self) -> None:
        """Audit without end. AssertionError: a law is broken. TimeoutError: an event got no audit
        in time."""
        while True:
            async with self._news:
                await self._news.wait_for(lambda: self._num_happened > self._num_proven)
            number = self._num_happened
            await self._until_clean()
            async with self._news:
                self._num_proven = number
                self._news.notify_all()

    async def _until_clean(self) -> None:
        """Audit until no pool recovers: in a recovery, blocks have no state yet, and the audit does
        not count."""
        try:
            async with asyncio.timeout(AUDIT_S):
                while not await self._is_clean():
                    await asyncio.sleep(0.1)
        except TimeoutError as error:
            raise TimeoutError("no audit came out clean") from error

    async def _is_clean(self) -> bool:
        audits = await self.ask(AsyncClient.audit) or ()
        wrong = [audit for audit in audits if audit.violations]
        assert not any(audit.ledger_checked for audit in wrong), wrong
        return bool(audits) and not wrong and all(audit.ledger_checked for audit in audits)

    async def until_empty(self, num_pools: int = 1) -> None:
        """Wait until nothing is held in at least `num_pools` pools. TimeoutError, with the pools:
        something still is."""
        pools = None
        try:
            async with asyncio.timeout(EMPTY_S):
                while True:
                    pools = await self.ask(AsyncClient.pools)
                    pools = pools or ()
                    if len(pools) >= num_pools and not any(pool.num_held for pool in pools):
                        return
                    await asyncio.sleep(0.1)
        except TimeoutError as error:
            raise TimeoutError(f"blocks are held, and nobody asks for anything: {pools}") from error
