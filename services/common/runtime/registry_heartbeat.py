"""Keeps a service in the registry: announced while it lives, withdrawn when it leaves."""

import asyncio
from collections.abc import Callable
from typing import NoReturn

from blockstore.errors import BlockStoreError, StoreUnavailable
from blockstore.registry import Member, Registry
from services.common.runtime.logging import get_logger
from services.common.runtime.ticks import until_tick

log = get_logger(__name__)


class RegistryHeartbeat:
    """Announces what `describe` answers every `interval_s`, with its load of that moment."""

    def __init__(
        self,
        registry: Registry,
        describe: Callable[[], Member],
        interval_s: float = 1.0,
        ttl_s: float = 3.0,
    ) -> None:
        self._registry = registry
        self._describe = describe
        self._interval_s = interval_s
        self._ttl_s = ttl_s
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """Announce now: the state is another one, others should not wait for the next time."""
        self._changed.set()

    async def keep(self) -> NoReturn:
        """Run until cancelled, then withdraw.

        A server that does not answer is logged and asked again; StoreLost is raised: it will never
        be the same server again.
        """
        try:
            while True:
                self._changed.clear()
                await self._announce()
                await self._pause()
        finally:
            await self._withdraw()

    async def _announce(self) -> None:
        try:
            await self._registry.announce(self._describe(), self._ttl_s)
        except StoreUnavailable as error:
            log.warning("announce_failed", reason=str(error))

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(until_tick(self._interval_s)):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def _withdraw(self) -> None:
        """Without an answer the entry runs out by itself."""
        try:
            async with asyncio.timeout(self._interval_s):
                await self._registry.withdraw(self._describe().member_id)
        except (BlockStoreError, TimeoutError) as error:
            log.warning("withdraw_failed", reason=str(error))
