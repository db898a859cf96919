"""A source: another pool that this mover may read. It joins that pool as a member on another host,
under a lease, and knows how fast it can be read."""

import asyncio
from itertools import chain

from blockstore.errors import BlockStoreError
from blockstore.redis_store import RedisStore
from blockstore.registry import Member
from blockstore.store import FUNCTION_LIBRARY
from quire.v1 import mover_pb2, mover_pb2_grpc
from services.common.pool.header import PoolHeader
from services.common.pool.names import REMOTE_ROLE, new_worker_id
from services.common.pool.sizing import parse_size
from services.common.pool.stamps import Stamps
from services.common.rpc.proof import Proof
from services.common.rpc.tls import service_tls
from services.common.rpc.transport import open_channel, translate_errors
from services.common.runtime import redis
from services.common.runtime.logging import get_logger
from services.common.runtime.secret import deployment_secret
from services.mover.config import MoverSettings
from services.mover.pull import Copies, Source, Stamping
from services.mover.transport import (
    Area,
    OutOfReach,
    State,
    Transport,
    TransportError,
    stamps_region,
)
from services.protocol.version import PROTOCOL_VERSION

log = get_logger(__name__)

_DESCRIBE_S = 5.0
_STORE_S = 5.0
_POLL_S = 0.0005
_RENEWALS = 4
"""How often a lease is renewed in its time: two renewals may fail."""

NUM_PULLS = 4
"""The most pulls of one source at a time: enough to hide the calls of the stores behind reads."""

_WEIGHT = 0.3
"""The weight of the newest measurement in the running mean."""


class Bandwidth:
    """The measured bandwidth of a source in bytes a second; 0: not measured yet."""

    def __init__(self) -> None:
        self.bytes_per_s = 0.0

    def observe(self, num_bytes: int, seconds: float) -> None:
        if num_bytes and seconds > 0:
            value, before = num_bytes / seconds, self.bytes_per_s
            self.bytes_per_s = before + _WEIGHT * (value - before) if before else value


class Peer:
    """A joined source. `source.is_broken` ends it; the mover then opens another one."""

    def __init__(self, member: Member, source: Source, lease_s: float) -> None:
        self.member = member
        self.source = source
        self.bandwidth = Bandwidth()
        self._lease_s = lease_s
        self._clock = asyncio.get_running_loop().time
        self._lease_ends = self._clock()

    @property
    def has_lease(self) -> bool:
        """Whether this mover still has its lease, counted from before the renewal was sent: it ends
        here no later than at the store."""
        return self._clock() < self._lease_ends and not self.source.is_broken

    async def renew(self) -> tuple[str, ...]:
        """Join, or renew the lease. Returns the holders that the source demands back. Raises the
        store's errors."""
        source, sent_at = self.source, self._clock()
        lease_ms = round(self._lease_s * 1000)
        await source.store.register_worker(source.spec, source.member_id, lease_ms=lease_ms)
        self._lease_ends = sent_at + self._lease_s
        heartbeat = await source.store.heartbeat(source.spec.pool_id, source.member_id)
        if heartbeat.fenced:
            source.is_broken = True
        return heartbeat.demands

    @property
    def renewal_s(self) -> float:
        return self._lease_s / _RENEWALS

    async def close(self, transport: Transport) -> None:
        """Leave the source once no pull reads it. Its block manager does what fails here."""
        self.source.is_broken = True
        unused = [await self.source.stampings.get() for _ in range(NUM_PULLS)]
        try:
            await self.source.store.leave(self.source.spec.pool_id, self.source.member_id)
        except BlockStoreError as error:
            log.info("source_not_left", pool_id=self.source.spec.pool_id, reason=str(error))
        await self.source.store.close()
        await asyncio.to_thread(self._forget, transport, unused)

    def _forget(self, transport: Transport, unused: list[Stamping]) -> None:
        try:
            transport.disconnect(self.source.memory)
            for copies in chain.from_iterable(unused):
                transport.forget(copies.prepared)
        except TransportError as error:
            log.warning("source_not_forgotten", reason=str(error))


async def open_peer(
    member: Member, header: PoolHeader, transport: Transport, settings: MoverSettings
) -> Peer | None:
    """Join the pool of another mover. None: that pool has other weights or another layout, or is
    out of reach. Raises QuireError, BlockStoreError or TransportError."""
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
    source = Source(store, theirs.spec, new_worker_id(REMOTE_ROLE), memory)
    for _ in range(NUM_PULLS):
        source.stampings.put_nowait((_copies(transport, theirs), _copies(transport, theirs)))
    peer = Peer(member, source, settings.lease_s)
    try:
        await peer.renew()
        await _probe(peer, theirs, transport, parse_size(settings.probe_size))
    except BaseException:
        await peer.close(transport)
        raise
    return peer


async def _describe(member: Member, settings: MoverSettings) -> mover_pb2.DescribeResponse:
    method = "/quire.v1.Mover/Describe"
    proof = Proof(deployment_secret(settings).rpc_key, method, member.member_id)
    request = mover_pb2.DescribeRequest(
        protocol_version=PROTOCOL_VERSION, function_library=FUNCTION_LIBRARY
    )
    async with open_channel(member.address, service_tls(settings)) as channel:
        with translate_errors():
            call = mover_pb2_grpc.MoverStub(channel).Describe(
                request, timeout=_DESCRIBE_S, metadata=proof.metadata
            )
            described: mover_pb2.DescribeResponse = await call
            proof.check(await call.initial_metadata())
    return described


def _copies(transport: Transport, header: PoolHeader) -> Copies:
    stamps = Stamps.private(header.num_blocks, header.layout.block_size)
    return Copies(stamps, transport.prepare(stamps_region(stamps, header)))


async def _probe(peer: Peer, header: PoolHeader, transport: Transport, num_bytes: int) -> None:
    """Measure the bandwidth: read the first blocks of the pool to memory of the probe's own,
    whatever they hold. The first read of all connects, and is not measured."""
    block_bytes = header.layout.block_bytes
    num_blocks = max(1, min(header.num_blocks, num_bytes // block_bytes))
    parts = header.layout.tensor_parallel_size
    scratch = transport.prepare(transport.allocate(parts, block_bytes, num_blocks))
    for number in (1, num_blocks):
        blocks = range(number)
        began = asyncio.get_running_loop().time()
        await _read_all(peer.source, transport, blocks, scratch)
        seconds = asyncio.get_running_loop().time() - began
    transport.forget(scratch)
    peer.bandwidth.observe(num_blocks * block_bytes * parts, seconds)
    log.info(
        "source_joined",
        pool_id=header.pool_id,
        member_id=peer.source.member_id,
        bandwidth_bytes_per_s=round(peer.bandwidth.bytes_per_s),
        probe_bytes=num_blocks * block_bytes * parts,
    )


async def _read_all(source: Source, transport: Transport, blocks: range, scratch: object) -> None:
    """Without a time limit: the memory may not be freed before the read has ended, however late."""
    transfer = await asyncio.to_thread(
        transport.read, source.memory, Area.BLOCKS, blocks, scratch, blocks
    )
    while (state := transfer.poll()) is State.RUNNING:  # noqa: ASYNC110 - it sets no event
        await asyncio.sleep(_POLL_S)
    transfer.release()
    if state is State.FAILED:
        raise TransportError("the probe failed")
