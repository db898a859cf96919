"""`Registry` in plain Python, in place of a server."""

import time
from collections.abc import Callable

from blockstore.registry import Member


class MemoryRegistry:
    """Keeps members and arrivals in one process. `clock` returns seconds from any start; expiry of
    members and arrivals follow it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._members: dict[str, tuple[Member, float]] = {}  # id -> (member, gone at)
        self._last_arrival = 0
        self._adapters: dict[str, str] = {}
        self._usage: dict[int, dict[str, str]] = {}
        self.run_id = "1"

    def lose(self) -> None:
        """Begin anew without any data, as a server that has started again."""
        self._members, self._adapters, self._usage = {}, {}, {}
        self.run_id += "1"

    async def announce(self, member: Member, ttl_s: float) -> None:
        self._members[member.member_id] = (member, self._clock() + ttl_s)

    async def withdraw(self, member_id: str) -> None:
        self._members.pop(member_id, None)

    async def members(self) -> tuple[Member, ...]:
        now = self._clock()
        self._members = {key: entry for key, entry in self._members.items() if now < entry[1]}
        return tuple(self._members[key][0] for key in sorted(self._members))

    async def next_arrival(self) -> int:
        self._last_arrival = max(int(1000 * self._clock()), self._last_arrival + 1)
        return self._last_arrival

    async def adapters(self) -> dict[str, str]:
        return dict(self._adapters)

    async def set_adapter(self, name: str, entry: str) -> None:
        self._adapters[name] = entry

    async def remove_adapter(self, name: str) -> None:
        self._adapters.pop(name, None)

    async def set_usage(self, minute: int, source: str, entry: str) -> None:
        self._usage.setdefault(minute, {})[source] = entry

    async def usage(self, first: int, last: int) -> list[dict[str, str]]:
        return [self._usage.get(minute, {}) for minute in range(first, last + 1)]

    async def close(self) -> None:
        """Nothing to close."""
