"""The registry of one process: its workers, and the arrivals of its requests."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from blockstore.registry import Member
from services.worker.pool_worker import PoolWorker


@dataclass(frozen=True, slots=True)
class LocalMember:
    """A worker of this process, with its entry in the registry."""

    member: Member
    worker: PoolWorker


class LocalRegistry:
    """Implements `Registry` for workers that live as long as the process."""

    def __init__(self, members: Sequence[LocalMember]) -> None:
        self._members = {local.member.member_id: local for local in members}
        self._arrivals = itertools.count(time.time_ns() // 1_000_000)

    def local(self, member: Member) -> LocalMember:
        return self._members[member.member_id]

    async def announce(self, member: Member, ttl_s: float) -> None:
        """Nothing: no other process reads this registry."""

    async def withdraw(self, member_id: str) -> None:
        """Nothing: see `announce`."""

    async def members(self) -> tuple[Member, ...]:
        return tuple(local.member for local in self._members.values())

    async def next_arrival(self) -> int:
        return next(self._arrivals)

    async def close(self) -> None: ...
