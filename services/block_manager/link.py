"""The connection to the block store and the registry, made again whenever the server lost its data.

Everything that the block manager does is a round that may fail as a whole and is done again, so
this is the only place that knows of servers that go and come back.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from blockstore.errors import Recovering, StoreLost, StoreUnavailable, StoreUnsuitable, UnknownPool
from blockstore.registry import Registry
from blockstore.store import BlockStore
from services.common.runtime.logging import get_logger
from services.common.runtime.ticks import until_tick

log = get_logger(__name__)

RETRY_INTERVAL_S = 0.25

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Connection:
    """Both of one server, which is still the one that was connected to, or StoreLost."""

    store: BlockStore
    registry: Registry

    async def of_all_pools(self, read: Callable[[str], Awaitable[T]]) -> list[T]:
        """What `read` answers for each pool, by id; one that is dropped meanwhile is left out."""
        answers = []
        for pool_id in await self.store.pool_ids():
            with suppress(UnknownPool):
                answers.append(await read(pool_id))
        return answers

    async def close(self) -> None:
        await self.store.close()
        await self.registry.close()


Round = Callable[[Connection], Awaitable[None]]


class Link:
    """`connection` is the one of the moment."""

    def __init__(
        self, connection: Connection, connect: Callable[[], Awaitable[Connection]]
    ) -> None:
        self.connection = connection
        self._connect = connect
        self._replacing = asyncio.Lock()

    async def every(self, pause_s: Callable[[], float], action: Round) -> NoReturn:
        """Do it again and again, with a pause after each round; a round that the server did not
        answer, or whose pool was dropped in the middle of it, is logged and left out."""
        while True:
            await self.attempt(action)
            await asyncio.sleep(until_tick(pause) if (pause := pause_s()) else 0)

    async def until_done(self, action: Round) -> None:
        """Do it once, however long the server is away."""
        while True:
            if await self.attempt(action):
                return
            await asyncio.sleep(RETRY_INTERVAL_S)

    async def close(self) -> None:
        await self.connection.close()

    async def attempt(self, action: Round) -> bool:
        """Do it once; whether it was done."""
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
            await asyncio.sleep(RETRY_INTERVAL_S)
