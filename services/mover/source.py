"""A source: a pool that this mover may read. The mover joins it as a member on another host, under
a lease, and measures its bandwidth."""

import asyncio
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from blockstore.errors import BlockStoreError
from blockstore.records import PoolSpec
from blockstore.redis_store import RedisStore
from blockstore.registry import Member
from blockstore.store import BlockStore
from quire.v1 import mover_pb2, mover_pb2_grpc
from quire.worker_names import new_worker_id
from services.mover.config import MoverSettings
from services.mover.transport import (
    Area,
    OutOfReach,
    Transport,
    TransportError,
    landed,
    stamps_region,
)
from services.pool.header import PoolHeader
from services.pool.names import REMOTE_ROLE
from services.pool.stamps import Stamps
from services.protocol.version import LIBRARIES, spoken_with
from services.runtime import redis
from services.runtime.logging import get_logger
from services.runtime.rpc.proof import Proof
from services.runtime.rpc.tls import service_tls
from services.runtime.rpc.transport import open_channel, translate_errors
from services.runtime.secret import deployment_secret

log = get_logger(__name__)

_DESCRIBE_S = 5.0
_STORE_S = 5.0
_PROBE_BYTES = 16 * 1024 * 1024
"""How much a probe of the bandwidth reads: a slow link of 100 MiB/s takes 0.16 s for it."""
_RENEWALS = 4
"""The number of renewals in the time of a lease, so that two may fail."""

NUM_PULLS = 4
"""The most pulls of one source at a time: enough to hide the calls of the stores behind reads."""

_WEIGHT = 0.3
"""The weight of the newest measurement in the running mean."""


@dataclass(slots=True)
class Side:
    """A pool of a pull, and this mover's name on it."""

    store: BlockStore
    spec: PoolSpec
    member_id: str


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies of a pool's stamps, each at its place, and their memory `prepared` for reads."""

    stamps: Stamps
    prepared: Any


Stamping = tuple[Copies, Copies]
"""The memory into which one pull reads a source's stamps: before its blocks, and after them."""


@dataclass(slots=True)
class Source(Side):
    """The pool that a pull reads."""

    memory: Any
    """The transport's object for the pool's memory."""
    lease_s: float
    stampings: "asyncio.Queue[Stamping]" = field(default_factory=asyncio.Queue)
    """The memory for stamps that no pull uses. It limits how many pulls of the source run."""
    bytes_per_s: float = 0.0
    """The measured bandwidth; 0 before the first measurement."""
    is_broken: bool = False
    """After a failed call nothing is pulled, and the mover opens another source."""
    _lease_ends: float = 0.0

    def measure(self, num_bytes: int, seconds: float) -> None:
        """Take a read of this size into the mean of the bandwidth."""
        if num_bytes and seconds > 0:
            value, before = num_bytes / seconds, self.bytes_per_s
            self.bytes_per_s = before + _WEIGHT * (value - before) if before else value

    @property
    def pool_id(self) -> str:
        return self.spec.pool_id

    @property
    def has_lease(self) -> bool:
        """Whether this mover still has its lease. The lease counts from before its renewal was
        sent, so it ends here no later than at the store."""
        return asyncio.get_running_loop().time() < self._lease_ends and not self.is_broken

    @property
    def renewal_s(self) -> float:
        return self.lease_s / _RENEWALS

    async def renew(self) -> tuple[str, ...]:
        """Join, or renew the lease, and return the holders that the source demands back. Raises the
        store's errors."""
        sent_at = asyncio.get_running_loop().time()
        lease_ms = round(self.lease_s * 1000)
        await self.store.register_worker(self.spec, self.member_id, lease_ms=lease_ms)
        self._lease_ends = sent_at + self.lease_s
        heartbeat = await self.store.heartbeat(self.pool_id, self.member_id)
        self.is_broken |= heartbeat.fenced
        return heartbeat.demands

    async def close(self, transport: Transport) -> None:
        """Leave the source once no pull reads it. Its block manager does what fails here."""
        self.is_broken = True
        unused = [await self.stampings.get() for _ in range(NUM_PULLS)]
        try:
            await self.store.leave(self.pool_id, self.member_id)
        except BlockStoreError as error:
            log.info("source_not_left", pool_id=self.pool_id, reason=str(error))
        await self.store.close()
        await asyncio.to_thread(self._forget, transport, unused)

    def _forget(self, transport: Transport, unused: list[Stamping]) -> None:
        try:
            transport.disconnect(self.memory)
            for copies in chain.from_iterable(unused):
                transport.forget(copies.prepared)
        except TransportError as error:
            log.warning("source_not_forgotten", reason=str(error))


async def open_source(
    member: Member, header: PoolHeader, transport: Transport, settings: MoverSettings
) -> Source | None:
    """Join the pool of another mover. Returns None if that pool has other weights or another
    layout, or is out of reach. Raises QuireError, BlockStoreError or TransportError."""
    described = await _describe(member, settings)
    theirs = PoolHeader.parse(described.header)
    if theirs.layout != header.layout or described.transport != transport.name:
        log.info("source_differs", pool_id=theirs.pool_id, transport=described.transport)
        return None
    try:
        memory = await asyncio.to_thread(transport.connect, described.memory)
    except OutOfReach as error:
        log.warning("source_out_of_reach", pool_id=theirs.pool_id, reason=str(error))
        return None
    store = await RedisStore.connect(redis.connection_url(settings), retry_for_s=_STORE_S)
    source = Source(
        store, theirs.spec, new_worker_id(REMOTE_ROLE), memory, lease_s=settings.lease_s
    )
    for _ in range(NUM_PULLS):
        source.stampings.put_nowait((_copies(transport, theirs), _copies(transport, theirs)))
    try:
        await source.renew()
        await _probe(source, theirs, transport, _PROBE_BYTES)
    except BaseException:
        await source.close(transport)
        raise
    return source


async def _describe(member: Member, settings: MoverSettings) -> mover_pb2.DescribeResponse:
    method = "/quire.v1.Mover/Describe"
    proof = Proof(deployment_secret(settings).rpc_key, method, member.member_id)
    spoken = spoken_with(member.protocol_version)
    request = mover_pb2.DescribeRequest(protocol_version=spoken, function_library=LIBRARIES[spoken])
    async with open_channel(member.address, service_tls(settings)) as channel:
        with translate_errors():
            call = mover_pb2_grpc.MoverStub(channel).Describe(
                request, timeout=_DESCRIBE_S, metadata=proof.metadata
            )
            described: mover_pb2.DescribeResponse = await call
            proof.check(await call.initial_metadata())
    return described


def _copies(transport: Transport, header: PoolHeader) -> Copies:
    stamps = Stamps(None, header.num_blocks, header.layout.block_size)
    return Copies(stamps, transport.prepare(stamps_region(stamps, header)))


async def _probe(source: Source, header: PoolHeader, transport: Transport, num_bytes: int) -> None:
    """Measure the bandwidth by a read of the pool's first blocks. A first read, which connects, is
    not measured. No read has a time limit, because its memory may not be freed before it has ended.
    """
    block_bytes = header.layout.block_bytes
    num_blocks = max(1, min(header.num_blocks, num_bytes // block_bytes))
    parts = header.layout.tensor_parallel_size
    scratch = transport.prepare(transport.allocate(parts, block_bytes, num_blocks))
    for number in (1, num_blocks):
        blocks = range(number)
        began = asyncio.get_running_loop().time()
        read = source.memory, Area.BLOCKS, blocks, scratch, blocks
        await landed(await asyncio.to_thread(transport.read, *read))
        seconds = asyncio.get_running_loop().time() - began
    transport.forget(scratch)
    probe_bytes = num_blocks * header.spec.block_bytes
    source.measure(probe_bytes, seconds)
    log.info(
        "source_joined",
        pool_id=header.pool_id,
        member_id=source.member_id,
        bandwidth_bytes_per_s=round(source.bytes_per_s),
        probe_bytes=probe_bytes,
    )
