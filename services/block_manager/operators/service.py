"""The gRPC service quire.v1.BlockManager, which answers operators."""

from dataclasses import asdict
from functools import partial
from typing import Any

from blockstore.records import PoolStats
from blockstore.registry import Member
from quire.v1 import block_manager_pb2 as pb
from quire.v1 import block_manager_pb2_grpc
from quire.worker_names import role_of
from services.block_manager.auditor import LastAudits
from services.block_manager.operators.block_watch import BlockWatch, to_wire
from services.block_manager.operators.drain import Drainer, tell
from services.block_manager.operators.reload import Reloader
from services.block_manager.rounds import RoundRunner
from services.pool.names import REMOTE_ROLE
from services.protocol.codec import load_to_wire
from services.protocol.fields import values
from services.protocol.messages import LoadReport
from services.runtime.rpc.tls import TlsFiles

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["BlockManager"].full_name

_STATES = {
    "starting": pb.WORKER_STATE_STARTING,
    "serving": pb.WORKER_STATE_SERVING,
    "draining": pb.WORKER_STATE_DRAINING,
}
_SPEC_FIELDS = ("pool_id", "model", "fingerprint", "block_size", "block_bytes", "num_blocks")
_STATS_FIELDS = (
    *("num_free", "num_cached", "num_held", "num_holders", "num_waiters", "worker_ids"),
    *("num_prefix_queries", "num_prefix_hits", "recovering", "missing_worker_ids"),
    "num_retained",
)
"""Fields that are equal in the store's records and in the message `Pool`."""


class BlockManagerService(block_manager_pb2_grpc.BlockManagerServicer):
    """Answers operators from the store and the registry. Raises errors of the store and of the
    domain, which `services.runtime.rpc.transport` maps to gRPC status codes."""

    def __init__(
        self,
        runner: RoundRunner,
        member_id: str,
        rpc_key: bytes,
        drain_timeout_s: float,
        last_audits: LastAudits,
        tls: TlsFiles | None = None,
    ) -> None:
        self._runner = runner
        self._last_audits = last_audits
        self._watch = BlockWatch()
        to_workers = partial(tell, peer_id=member_id, rpc_key=rpc_key, tls=tls), drain_timeout_s
        self._drainer, self._reloader = Drainer(*to_workers), Reloader(*to_workers)

    async def ListPools(self, request: pb.ListPoolsRequest, context: Any) -> pb.ListPoolsResponse:
        connection = self._runner.connection
        found = await connection.of_all_pools(connection.store.stats)
        return pb.ListPoolsResponse(pools=map(_pool, found))

    async def ListWorkers(
        self, request: pb.ListWorkersRequest, context: Any
    ) -> pb.ListWorkersResponse:
        """List the workers in the registry, and those that the store has on a pool but that are not
        in the registry yet, or no longer. Members on other hosts are left out."""
        connection = self._runner.connection
        pools = await connection.of_all_pools(connection.store.stats)
        fenced = {worker_id for stats in pools for worker_id in stats.fenced_worker_ids}
        members = [
            member
            for member in await connection.registry.members()
            if member.role in ("prefill", "decode", "mover")
        ]
        workers = [_worker(member, member.member_id in fenced) for member in members]
        announced = {member.member_id for member in members}
        workers += [
            _unannounced(worker_id, stats, worker_id in fenced)
            for stats in pools
            for worker_id in stats.worker_ids
            if worker_id not in announced and not worker_id.startswith(REMOTE_ROLE)
        ]
        workers.sort(key=lambda worker: worker.worker_id)
        return pb.ListWorkersResponse(workers=workers)

    async def Audit(self, request: pb.AuditRequest, context: Any) -> pb.AuditResponse:
        connection = self._runner.connection
        audit = connection.store.audit
        pool_id = request.pool_id
        reports = [await audit(pool_id)] if pool_id else await connection.of_all_pools(audit)
        for report in reports:
            self._last_audits.note(report)
        return pb.AuditResponse(pools=[pb.PoolAudit(**asdict(report)) for report in reports])

    async def WatchBlocks(
        self, request: pb.WatchBlocksRequest, context: Any
    ) -> pb.WatchBlocksResponse:
        response = pb.WatchBlocksResponse()
        for block_map in await self._watch.maps(self._runner.connection):
            pool = _pool(block_map.stats)
            wire = to_wire(block_map, pool)
            if last := self._last_audits.find(pool.pool_id):
                report, wire.last_audit_age_s = last
                wire.last_audit.CopyFrom(pb.PoolAudit(**asdict(report)))
            response.maps.append(wire)
        return response

    async def DescribeBlocks(
        self, request: pb.DescribeBlocksRequest, context: Any
    ) -> pb.DescribeBlocksResponse:
        connection = self._runner.connection
        blocks = await self._watch.describe(connection, request.pool_id, request.cell)
        return pb.DescribeBlocksResponse(blocks=blocks)

    async def DrainWorker(
        self, request: pb.DrainWorkerRequest, context: Any
    ) -> pb.DrainWorkerResponse:
        num_running = await self._drainer.drain(
            self._runner.connection,
            request.worker_id,
            force=request.force,
            next_role=request.next_role,
        )
        return pb.DrainWorkerResponse(num_running=num_running)

    async def Reload(self, request: pb.ReloadRequest, context: Any) -> pb.ReloadResponse:
        worker_ids = await self._reloader.reload(self._runner.connection.registry, request.model)
        return pb.ReloadResponse(worker_ids=worker_ids)


def _pool(stats: PoolStats) -> pb.Pool:
    shares = [pb.PoolShare(**asdict(share)) for share in stats.shares]
    return pb.Pool(
        **values(stats.spec, _SPEC_FIELDS), **values(stats, _STATS_FIELDS), shares=shares
    )


def _worker(member: Member, fenced: bool) -> pb.Worker:
    return pb.Worker(
        worker_id=member.member_id,
        role=member.role,
        address=member.address,
        pool_id=member.pool_id,
        model=member.model,
        state=pb.WORKER_STATE_FENCED if fenced else _STATES[member.state],
        load=load_to_wire(LoadReport(member.load, member.state == "draining")),
        engine=member.engine,
        started_unix_ms=member.started_unix_ms,
        pid=member.pid,
    )


def _unannounced(worker_id: str, stats: PoolStats, fenced: bool) -> pb.Worker:
    """Describe a worker that is on a pool but not in the registry, because it is starting or has
    stopped renewing its registration. The first part of its id is the role with which it started.
    """
    return pb.Worker(
        worker_id=worker_id,
        role=role_of(worker_id),
        pool_id=stats.spec.pool_id,
        model=stats.spec.model,
        state=pb.WORKER_STATE_FENCED if fenced else pb.WORKER_STATE_STARTING,
    )
