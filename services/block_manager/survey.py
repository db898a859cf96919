"""A snapshot of the store and the registry, read once a round for sweeper, fencer and auditor."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from blockstore.errors import UnknownPool
from blockstore.records import PoolStats
from blockstore.registry import Member
from services.block_manager.rounds import Connection


@dataclass(frozen=True, slots=True)
class Survey:
    """The members of the registry and the pools of the store."""

    members: tuple[Member, ...]
    pool_ids: frozenset[str]
    pools: Mapping[str, PoolStats]
    """The counters of each pool of `pool_ids` whose ledger the store has, by id."""

    @property
    def member_ids(self) -> frozenset[str]:
        return frozenset(member.member_id for member in self.members)

    @property
    def is_idle(self) -> bool:
        """Whether no pool has requests or is in recovery, and no worker is starting."""
        is_used = any(
            stats.num_holders or stats.num_waiters or stats.recovering
            for stats in self.pools.values()
        )
        return not is_used and all(member.state != "starting" for member in self.members)


async def survey(connection: Connection) -> Survey:
    """Take a snapshot. Raises errors of the store."""

    async def read(pool_id: str) -> PoolStats | None:
        try:
            return await connection.store.stats(pool_id)
        except UnknownPool:  # dropped meanwhile, or lost when the server restarted
            return None

    members, pool_ids = await asyncio.gather(
        connection.registry.members(), connection.store.pool_ids()
    )
    found = await asyncio.gather(*map(read, pool_ids))
    pools = {stats.spec.pool_id: stats for stats in found if stats is not None}
    return Survey(members, frozenset(pool_ids), pools)
