"""`python -m services.block_manager`: runs a block manager until SIGTERM."""

from services.runtime.starting import begin_start

if __name__ == "__main__":
    begin_start()

import asyncio
import time
from contextlib import suppress

from prometheus_client import CollectorRegistry

from blockstore.errors import BlockStoreError
from blockstore.redis_store import RedisStore
from blockstore.registry import Member
from quire.v1 import block_manager_pb2_grpc
from quire.worker_names import new_worker_id
from services.block_manager.auditor import LastAudits
from services.block_manager.config import BlockManagerSettings
from services.block_manager.manager import BlockManager
from services.block_manager.operators.service import SERVICE_NAME, BlockManagerService
from services.block_manager.rounds import Connection, RoundRunner
from services.protocol.version import PROTOCOL_VERSION
from services.runtime import redis
from services.runtime.exposition import metrics_endpoint
from services.runtime.health import Health
from services.runtime.logging import get_logger
from services.runtime.metrics import PoolMetrics
from services.runtime.process import retry_until_available, run_service
from services.runtime.rpc.proof import Guard
from services.runtime.rpc.tls import service_tls
from services.runtime.rpc.transport import RpcServer
from services.runtime.secret import deployment_secret

log = get_logger(__name__)

_ANNOUNCE_INTERVAL_S = 1.0
_TTL_S = 5.0
_DRAIN_TIMEOUT_S = 5.0
"""How long a worker may take to answer a drain. An answer takes milliseconds."""


def main() -> None:
    run_service(BlockManagerSettings, serve)


async def serve(settings: BlockManagerSettings, stop: asyncio.Event) -> None:
    metrics = CollectorRegistry()
    pool_metrics = PoolMetrics(metrics)

    async def open_connection() -> Connection:
        return await connect(settings, pool_metrics)

    first = await retry_until_available(
        open_connection, "the block store", settings.redis_patience_s
    )
    runner = RoundRunner(first, open_connection)
    try:
        health = Health()
        with metrics_endpoint(settings, metrics, health):
            await _serve(settings, runner, pool_metrics, stop, health)
    finally:
        await runner.connection.close()


async def connect(settings: BlockManagerSettings, metrics: PoolMetrics) -> Connection:
    """Connect to the store and the registry of one server. Raises StoreUnavailable if the server
    does not answer, or StoreUnsuitable."""
    store = await RedisStore.connect(redis.connection_url(settings))
    try:
        registry = await redis.open_registry(
            settings, on_refused=lambda member_id: metrics.members_refused.inc()
        )
    except BaseException:
        await store.close()
        raise
    return Connection(store, registry)


async def _serve(
    settings: BlockManagerSettings,
    runner: RoundRunner,
    metrics: PoolMetrics,
    stop: asyncio.Event,
    health: Health,
) -> None:
    member_id = new_worker_id("block_manager")
    rpc_key = deployment_secret(settings).rpc_key
    tls = service_tls(settings)
    server = RpcServer(SERVICE_NAME, guard=Guard(rpc_key, member_id), tls=tls, health=health)
    last_audits = LastAudits()
    service = BlockManagerService(runner, member_id, rpc_key, _DRAIN_TIMEOUT_S, last_audits, tls)
    block_manager_pb2_grpc.add_BlockManagerServicer_to_server(service, server.aio)
    port = await server.start(settings.host, settings.port)
    member = Member(
        member_id=member_id,
        role="block_manager",
        address=settings.address(port),
        state="serving",
        started_unix_ms=time.time_ns() // 1_000_000,
        protocol_version=PROTOCOL_VERSION,
    )

    async def announce(connection: Connection) -> None:
        await connection.registry.announce(member, _TTL_S)

    try:
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(BlockManager(settings, runner, metrics, last_audits).run()),
                tasks.create_task(runner.run_every(lambda: _ANNOUNCE_INTERVAL_S, announce)),
            ]
            await server.set_serving(True)
            log.info("block_manager_serving", member_id=member_id, address=member.address)
            await stop.wait()
            for task in running:
                task.cancel()
    finally:
        await server.stop()
        with suppress(BlockStoreError):  # without an answer, the registration expires by itself
            await runner.connection.registry.withdraw(member_id)


if __name__ == "__main__":
    main()
