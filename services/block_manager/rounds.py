"""Runs the block manager's rounds on a connection to the block store and the registry, which is
replaced whenever the server has lost its data.

All work of the block manager is done in rounds. A round may fail as a whole and is repeated, so
only this module handles a server that stops answering and returns.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from blockstore.errors import Recovering, StoreLost, StoreUnavailable, StoreUnsuitable, UnknownPool
from blockstore.registry import Registry
from blockstore.store import BlockStore
from services.runtime.logging import get_logger
from services.runtime.ticks import until_tick

log = get_logger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Connection:
    """The block store and the registry of one server. Calls raise StoreLost once the server has
    lost its data."""

    store: BlockStore
    registry: Registry

    async def of_all_pools(self, read: Callable[[str], Awaitable[T]]) -> list[T]:
        """Return what `read` answers for each pool. A pool that is dropped meanwhile is left
        out."""
        answers = []
        for pool_id in await self.store.pool_ids():
            with suppress(UnknownPool):
                answers.append(await read(pool_id))
        return answers

    async def close(self) -> None:
        await self.store.close()
        await self.registry.close()


Round = Callable[[Connection], Awaitable[None]]


class RoundRunner:
    """Runs rounds on the current `connection`, and makes a new one with `connect` when the server
    has lost its data. What fails is tried again after `retry_s`."""

    def __init__(
        self,
        connection: Connection,
        connect: Callable[[], Awaitable[Connection]],
        retry_s: float = 0.25,
    ) -> None:
        self.connection = connection
        self._retry_s = retry_s
        self._connect = connect
        self._replacing = asyncio.Lock()

    async def run_every(self, pause_s: Callable[[], float], action: Round) -> NoReturn:
        """Run `action` forever, with a pause after each round. A round fails if the server does not
        answer or a pool is dropped in the middle of it; that is logged."""
        while True:
            await self.run_once(action)
            await asyncio.sleep(until_tick(pause) if (pause := pause_s()) else 0)

    async def run_until_done(self, action: Round) -> None:
        """Run `action` until one round succeeds, however long the server is away."""
        while True:
            if await self.run_once(action):
                return
            await asyncio.sleep(self._retry_s)

    async def run_once(self, action: Round) -> bool:
        """Run `action` once. Returns whether it succeeded."""
        connection = self.connection
        try:
            await action(connection)
        except StoreUnavailable as error:
            log.warning("store_unavailable", reason=str(error))
        except StoreLost as error:
            log.warning("store_lost", reason=str(error))
            await self._replace(connection)
        except UnknownPool as error:
            log.info("pool_vanished", reason=str(error))
        except Recovering as error:
            log.info("pool_recovering", reason=str(error))
        else:
            return True
        return False

    async def _replace(self, lost: Connection) -> None:
        async with self._replacing:
            if self.connection is not lost:
                return
            self.connection = await self._connected()
            log.info("store_replaced")
            await lost.close()

    async def _connected(self) -> Connection:
        while True:
            try:
                return await self._connect()
            except (StoreUnavailable, StoreUnsuitable) as error:
                log.warning("store_not_connected", reason=str(error))
            await asyncio.sleep(self._retry_s)
