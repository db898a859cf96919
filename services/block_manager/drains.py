"""Drains workers for operators: one drain at a time, and never the last serving worker of its role
on a pool, unless the operator forces it."""

import asyncio
from contextlib import suppress

from blockstore.errors import UnknownPool
from blockstore.registry import Member
from services.block_manager.drain import drain
from services.block_manager.rounds import Connection
from services.common.errors import LastWorker, Unavailable, UnknownWorker

_LAG_S = 5.0
"""How long the registry may still list a worker as serving after it was told to drain."""


class Drains:
    """Checks and sends drains. `peer_id` and `rpc_key` identify this block manager to the workers.
    A worker has `timeout_s` to answer."""

    def __init__(self, peer_id: str, rpc_key: bytes, timeout_s: float) -> None:
        self._peer_id = peer_id
        self._rpc_key = rpc_key
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()
        self._told: dict[str, float] = {}  # worker -> when its registered state is current again

    async def drain(self, connection: Connection, worker_id: str, *, force: bool) -> int:
        """Tell a worker to drain. Returns how many requests it still runs.

        UnknownWorker: the registry lists no prefill or decode worker with this id; LastWorker;
        Unavailable: the worker is starting or does not answer; TimeoutError: it did not answer in
        time, and may drain nevertheless.
        """
        async with self._turn:  # the second of two drains must see the first
            members = await connection.registry.members()
            worker = _worker(members, worker_id)
            if not force:
                await self._require_another(connection, members, worker)
            # Noted even if no answer comes: the worker may have received the message.
            self._told[worker_id] = asyncio.get_running_loop().time() + _LAG_S
            async with asyncio.timeout(self._timeout_s):
                return await drain(worker, self._peer_id, self._rpc_key)

    async def _require_another(
        self, connection: Connection, members: tuple[Member, ...], worker: Member
    ) -> None:
        """Raise LastWorker if `worker` is the last one of its role that serves the pool. A worker
        that drains already may be drained again."""
        now = asyncio.get_running_loop().time()
        self._told = {told: until for told, until in self._told.items() if until > now}
        fenced: tuple[str, ...] = ()
        with suppress(UnknownPool):
            fenced = (await connection.store.stats(worker.pool_id)).fenced_worker_ids
        peers = [m for m in members if (m.role, m.pool_id) == (worker.role, worker.pool_id)]
        serving = {m.member_id for m in peers if m.state == "serving"} - set(fenced)
        if worker.member_id in serving and serving - self._told.keys() <= {worker.member_id}:
            raise LastWorker(
                f"{worker.member_id} is the last {worker.role} worker that serves {worker.model} "
                f"on pool {worker.pool_id} (of {len(peers)} there, 1 serves): start another one "
                "first, or drain it with --force, and requests wait until there is another one"
            )


def _worker(members: tuple[Member, ...], worker_id: str) -> Member:
    worker = next((member for member in members if member.member_id == worker_id), None)
    if worker is None or worker.role not in ("prefill", "decode"):
        raise UnknownWorker(f"no worker {worker_id!r}")
    if worker.state == "starting":
        raise Unavailable(f"{worker_id} has not started yet; try again")
    return worker
