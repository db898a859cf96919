"""The block store in Redis: each operation is one call of a function in functions/*.lua.

Mutations go through one ordered stream, and are sent again, in order, until they are answered;
reads have a connection of their own, and so has listening for freed blocks.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from blockstore import keys
from blockstore.connection import Argument, Command, Server
from blockstore.errors import UnknownPool
from blockstore.library import install
from blockstore.redis_audit import audit_pool
from blockstore.rooms import Rooms
from blockstore.store import (
    FUNCTION_LIBRARY,
    Allocation,
    AuditReport,
    Extension,
    Grown,
    Growth,
    Heartbeat,
    HolderInfo,
    PoolSpec,
    PoolStats,
    PrefixHash,
)
from blockstore.stream import CommandStream

HOLDER_PAGE = 1000
MAX_ANSWER_S = 2.0
"""A connection that does not answer for so long is taken for broken."""


class RedisStore:
    """See `blockstore.store.BlockStore`; besides the errors there, every method raises
    StoreUnavailable and StoreLost."""

    def __init__(self, server: Server, retry_for_s: float) -> None:
        """Use `connect`."""
        self._server = server
        self._mutations = CommandStream(server, retry_for_s)
        self._reads = CommandStream(server, retry_for_s)
        self._rooms = Rooms(server)
        self._joined: set[str] = set()  # pools that are there, or the store is lost

    @classmethod
    async def connect(cls, url: str, *, retry_for_s: float = 5.0) -> Self:
        """A store on redis://, rediss:// or unix://, its functions loaded.

        `retry_for_s`: how long an unanswered call is sent again. StoreUnavailable: nobody there.
        StoreUnsuitable: older than Redis 7, evicting, a replica, or with other functions of this
        name.
        """
        server = Server(url, timeout_s=min(MAX_ANSWER_S, retry_for_s / 2))
        await install(server)
        return cls(server, retry_for_s)

    @property
    def run_id(self) -> str:
        """The server's, of the first connection."""
        return self._server.run_id

    async def close(self) -> None:
        await self._rooms.close()
        await self._mutations.close()
        await self._reads.close()

    # Pools

    async def register_pool(self, spec: PoolSpec) -> None:
        run_id = await self._mutate(
            *("register_pool", spec.pool_id, spec.model, spec.fingerprint, spec.num_blocks),
            *(spec.block_size, spec.block_bytes, spec.watermark_blocks, self.run_id),
        )
        self._join(spec.pool_id, run_id)
        await self._mutations.send("SADD", keys.POOLS, spec.pool_id)

    async def drop_pool(self, pool_id: str) -> None:
        self._joined.discard(pool_id)
        while await self._mutate("drop_pool", pool_id):
            pass
        await self._mutations.send("SREM", keys.POOLS, pool_id)

    async def pool_ids(self) -> tuple[str, ...]:
        names = await self._reads.send("SMEMBERS", keys.POOLS)
        return tuple(sorted(name.decode() for name in names))

    # Workers

    async def register_worker(self, spec: PoolSpec, worker_id: str) -> None:
        run_id = await self._mutate(
            *("register_worker", spec.pool_id, worker_id, spec.fingerprint),
            *(spec.num_blocks, spec.block_size, spec.block_bytes),
        )
        self._join(spec.pool_id, run_id)

    async def fence(self, pool_id: str, worker_id: str) -> None:
        await self._mutate("fence", pool_id, worker_id)

    async def leave(self, pool_id: str, worker_id: str) -> None:
        await self._mutate("leave", pool_id, worker_id)

    async def heartbeat(self, pool_id: str, worker_id: str) -> Heartbeat:
        fenced, *demands = await self._read("heartbeat", pool_id, worker_id)
        return Heartbeat(fenced == 1, _names(demands))

    async def reap(self, pool_id: str, worker_id: str) -> int:
        """After a lost answer the number may be too low; what it says is done is done."""
        num_released, is_more = 0, 1
        while is_more:
            num, is_more = await self._mutate("reap", pool_id, worker_id)
            num_released += num
        return num_released

    # Holders

    async def allocate(
        self,
        pool_id: str,
        holder_id: str,
        worker_id: str,
        order: int,
        hashes: Sequence[PrefixHash],
        num_blocks: int,
    ) -> Allocation:
        args: list[Argument] = [holder_id, worker_id, order, num_blocks, *hashes]
        reply = await self._mutate("allocate", pool_id, *args, about=(holder_id,))
        epoch, num_cached, *blocks = reply
        return Allocation(holder_id, epoch, _ids(blocks), num_cached)

    async def withdraw(self, pool_id: str, holder_id: str) -> None:
        await self._mutate("withdraw", pool_id, holder_id, about=(holder_id,))

    async def extend(self, pool_id: str, worker_id: str, growths: Sequence[Growth]) -> Extension:
        fields: list[Argument] = []
        for growth in growths:
            fields += (growth.holder_id, growth.epoch, growth.have, growth.total)
        about = {growth.holder_id for growth in growths}
        reply = await self._mutate("extend", pool_id, worker_id, *fields, about=about)
        demands, *answers = reply
        grown = (
            Grown(growth.holder_id, _ids(blocks), error.decode() or None)
            for growth, (error, *blocks) in zip(growths, answers, strict=True)
        )
        return Extension(tuple(grown), _names(demands))

    async def commit(
        self, pool_id: str, holder_id: str, epoch: int, blocks: Sequence[tuple[int, PrefixHash]]
    ) -> tuple[bool, ...]:
        fields = (value for block in blocks for value in block)
        flags = await self._mutate("commit", pool_id, holder_id, epoch, *fields, about=(holder_id,))
        return tuple(flag == 1 for flag in flags)

    async def retract(self, pool_id: str, block_id: int, prefix_hash: PrefixHash) -> None:
        await self._mutate("retract", pool_id, block_id, prefix_hash, about=())

    async def detach(self, pool_id: str, holder_id: str, epoch: int) -> int:
        return int(await self._mutate("detach", pool_id, holder_id, epoch, about=(holder_id,)))

    async def claim(
        self,
        pool_id: str,
        holder_id: str,
        epoch: int,
        worker_id: str,
        block_ids: Sequence[int] = (),
    ) -> int:
        reply = await self._mutate(
            "claim", pool_id, holder_id, epoch, worker_id, *block_ids, about=(holder_id,)
        )
        return int(reply)

    async def give_back(
        self, pool_id: str, holder_id: str, epoch: int, block_ids: Sequence[int]
    ) -> None:
        await self._mutate("give_back", pool_id, holder_id, epoch, *block_ids, about=(holder_id,))

    async def release(
        self, pool_id: str, holder_id: str, epoch: int, comes_back: bool = False
    ) -> None:
        await self._mutate(
            "release", pool_id, holder_id, epoch, int(comes_back), about=(holder_id,)
        )

    # Reading

    async def match(self, pool_id: str, hashes: Sequence[PrefixHash]) -> int:
        return int(await self._read("match", pool_id, *hashes))

    async def victim(self, pool_id: str) -> HolderInfo | None:
        info = await self._read("victim", pool_id)
        return None if info is None else _holder_info(info)

    async def holders(self, pool_id: str) -> tuple[HolderInfo, ...]:
        """Atomic up to 1,000 holders."""
        infos: list[HolderInfo] = []
        page = [None] * HOLDER_PAGE
        while len(page) == HOLDER_PAGE:
            page = await self._read("holders", pool_id, len(infos), HOLDER_PAGE)
            infos.extend(map(_holder_info, page))
        return tuple(sorted(infos, key=lambda info: (info.order, info.holder_id)))

    async def stats(self, pool_id: str) -> PoolStats:
        """UnknownPool: also one that the server has read back from a file."""
        reply = await self._read("stats", pool_id)
        header, num_free, num_cached, num_held, num_holders, num_waiters, workers = reply
        fields = _text_fields(header)
        if fields["run_id"] != self.run_id:
            raise UnknownPool(f"pool {pool_id} is of before the server's restart")
        fenced = _text_fields(workers)
        return PoolStats(
            spec=_spec(pool_id, fields),
            num_free=num_free,
            num_cached=num_cached,
            num_held=num_held,
            num_holders=num_holders,
            num_waiters=num_waiters,
            num_prefix_queries=int(fields["queries"]),
            num_prefix_hits=int(fields["hits"]),
            worker_ids=tuple(sorted(fenced)),
            fenced_worker_ids=tuple(sorted(name for name in fenced if fenced[name] == "1")),
        )

    async def audit(self, pool_id: str) -> AuditReport:
        async def read(*parts: str | int) -> list[Any]:
            return list(await self._read("ledger", pool_id, *parts))

        return await audit_pool(await self.stats(pool_id), read)

    async def wait_for_room(self, pool_id: str, timeout_s: float) -> None:
        async def require_pool() -> None:
            with self._known(pool_id):
                if not await self._reads.send("EXISTS", keys.pool_header(pool_id)):
                    raise UnknownPool(f"pool {pool_id} is not there")

        await self._rooms.wait(keys.room_channel(pool_id), timeout_s, require_pool)

    # Calling

    async def _mutate(
        self, function: str, pool_id: str, *args: Argument, about: Collection[str] | None = None
    ) -> Any:
        """`about`: the holders that it changes; None: the pool or a worker as a whole."""
        with self._known(pool_id):
            return await self._mutations.submit(_fcall("FCALL", function, pool_id, args), about)

    async def _read(self, function: str, pool_id: str, *args: Argument) -> Any:
        with self._known(pool_id):
            return await self._reads.submit(_fcall("FCALL_RO", function, pool_id, args))

    @contextmanager
    def _known(self, pool_id: str) -> Iterator[None]:
        """StoreLost: a pool that this store registered or joined is unknown to its server."""
        try:
            yield
        except UnknownPool as error:
            if pool_id in self._joined:
                raise self._server.lose(f"pool {pool_id} is gone") from error
            raise

    def _join(self, pool_id: str, run_id: bytes) -> None:
        """StoreLost: the pool was made before the server was restarted, and is back from a file: an
        old truth."""
        if run_id.decode() != self.run_id:
            raise self._server.lose(f"pool {pool_id} is of before its restart")
        self._joined.add(pool_id)


def _fcall(command: str, function: str, pool_id: str, args: Sequence[Argument]) -> Command:
    return command, f"{FUNCTION_LIBRARY}_{function}", 1, keys.pool_tag(pool_id), *args


def _ids(values: Sequence[bytes]) -> tuple[int, ...]:
    return tuple(map(int, values))


def _names(values: Sequence[bytes]) -> tuple[str, ...]:
    return tuple(value.decode() for value in values)


def _text_fields(flat: list[bytes]) -> dict[str, str]:
    return dict(zip(_names(flat[::2]), _names(flat[1::2]), strict=True))


def _holder_info(reply: list[Any]) -> HolderInfo:
    holder_id, epoch, worker_id, order, num_blocks = reply
    return HolderInfo(holder_id.decode(), epoch, worker_id.decode(), order, num_blocks)


def _spec(pool_id: str, fields: dict[str, str]) -> PoolSpec:
    return PoolSpec(
        pool_id=pool_id,
        model=fields["model"],
        fingerprint=fields["fingerprint"],
        num_blocks=int(fields["num_blocks"]),
        block_size=int(fields["block_size"]),
        block_bytes=int(fields["block_bytes"]),
        watermark_blocks=int(fields["watermark"]),
    )
