"""Keeps a service in the registry while the service runs, and withdraws it at the end."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from blockstore.errors import BlockStoreError, StoreUnavailable
from blockstore.registry import Member, Registry
from services.runtime.logging import get_logger
from services.runtime.ticks import until_tick

log = get_logger(__name__)


class RegistryHeartbeat:
    """Writes the service's entry into the registry every `interval_s`.

    `describe` returns the entry with the current state and load. The entry stays for `ttl_s`
    without renewal.
    """

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
        """Announce at once, because the state has changed."""
        self._changed.set()

    async def keep(self) -> NoReturn:
        """Announce until cancelled, then withdraw.

        If the server does not answer, this logs a warning and tries again. Raises StoreLost if the
        server has lost its data, so a retry cannot help.
        """
        try:
            while True:
                self._changed.clear()
                await self._announce()
                with suppress(TimeoutError):
                    async with asyncio.timeout(until_tick(self._interval_s)):
                        await self._changed.wait()
        finally:
            await self._withdraw()

    async def _announce(self) -> None:
        try:
            await self._registry.announce(self._describe(), self._ttl_s)
        except StoreUnavailable as error:
            log.warning("announce_failed", reason=str(error))

    async def _withdraw(self) -> None:
        """Remove the entry. Without an answer of the server the entry expires by itself."""
        try:
            async with asyncio.timeout(self._interval_s):
                await self._registry.withdraw(self._describe().member_id)
        except (BlockStoreError, TimeoutError) as error:
            log.warning("withdraw_failed", reason=str(error))
