"""The mover's process: waits for its pool, joins it, pulls until the pool has no workers."""

import asyncio
import faulthandler
import math
import os
import time
from contextlib import AsyncExitStack, suppress
from typing import NoReturn

from prometheus_client import CollectorRegistry

from blockstore.errors import BlockStoreError, UnknownWorker, WorkerFenced
from blockstore.redis_store import RedisStore
from blockstore.registry import Member, Registry
from quire.v1 import mover_pb2_grpc
from quire.worker_names import new_worker_id
from services.mover.config import MoverSettings
from services.mover.mover import Mover
from services.mover.nixl_transport import NixlTransport
from services.mover.own_pool import OwnPool, find_pool, join_pool
from services.mover.pull import Target
from services.mover.service import SERVICE_NAME, MoverService
from services.mover.transport import Transport, stamps_region
from services.pool.header import BadHeader
from services.protocol.version import PROTOCOL_VERSION
from services.runtime import redis
from services.runtime.exposition import metrics_endpoint
from services.runtime.health import Health
from services.runtime.logging import get_logger
from services.runtime.metrics import MoverMetrics
from services.runtime.process import EXIT_FAULT
from services.runtime.registry_heartbeat import RegistryHeartbeat
from services.runtime.rpc.proof import Guard
from services.runtime.rpc.tls import service_tls
from services.runtime.rpc.transport import RpcServer
from services.runtime.secret import deployment_secret
from services.runtime.ticks import until_tick

log = get_logger(__name__)

_POOL_POLL_S = 0.25


async def serve(settings: MoverSettings, stop: asyncio.Event) -> None:
    """Serve one pool after another until `stop`."""
    registry = CollectorRegistry()
    metrics = MoverMetrics(registry)
    async with AsyncExitStack() as stack:
        health = Health()
        stack.enter_context(metrics_endpoint(settings, registry, health))
        while not stop.is_set():
            await _serve_one(settings, metrics, stop, health)


async def _serve_one(
    settings: MoverSettings, metrics: MoverMetrics, stop: asyncio.Event, health: Health
) -> None:
    """Serve the host's pool under a new name, with a new agent of the transport, until the pool has
    no workers, this mover was given up, or `stop`."""
    async with AsyncExitStack() as stack:
        store, members = await redis.connect(settings, stack, store_retry_for_s=math.inf)
        own = await _joined(settings, store, stop)
        if own is None:
            return
        stack.callback(own.close)
        transport = _transport(own)
        stack.callback(transport.close)
        memory = transport.share(own.blocks_region, stamps_region(own.stamps, own.header))
        target = Target(
            store,
            own.spec,
            own.member_id,
            own.stamps,
            transport.prepare(own.blocks_region),
            may_write=lambda: not own.lock.is_revoked,
            end_process=_end_process,
        )
        mover = Mover(own, target, transport, members, settings, metrics)
        service = MoverService(mover, own.header, transport.name, memory)
        server, address = await _listen(settings, service, own.member_id, stack, health)
        try:
            await _run(mover, own, members, address, stop)
        finally:
            await server.stop()
            await mover.close()
        with suppress(BlockStoreError):
            await own.leave()


def _transport(own: OwnPool) -> Transport:
    if own.header.kind == "file":
        return NixlTransport(own.member_id)
    from services.mover.peer_transport import PeerTransport  # imports torch

    return PeerTransport(own.directory, own.header, _end_process)


async def _joined(
    settings: MoverSettings, store: RedisStore, stop: asyncio.Event
) -> OwnPool | None:
    """Wait for the host's pool and join it. Returns None if it is stopped before."""
    while not stop.is_set():
        if directory := find_pool(settings.pool_root, settings.model_name):
            with suppress(FileNotFoundError, BadHeader):
                return await join_pool(store, directory, new_worker_id("mover"))
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), until_tick(_POOL_POLL_S))
    return None


async def _listen(
    settings: MoverSettings,
    service: MoverService,
    member_id: str,
    stack: AsyncExitStack,
    health: Health,
) -> tuple[RpcServer, str]:
    guard = Guard(deployment_secret(settings).rpc_key, member_id)
    server = RpcServer(SERVICE_NAME, guard=guard, tls=service_tls(settings), health=health)
    mover_pb2_grpc.add_MoverServicer_to_server(service, server.aio)
    address = settings.address(await server.start(settings.host, settings.port))
    stack.push_async_callback(server.stop)
    await server.set_serving(True)
    return server, address


async def _run(
    mover: Mover, own: OwnPool, members: Registry, address: str, stop: asyncio.Event
) -> None:
    started_unix_ms = time.time_ns() // 1_000_000

    def describe() -> Member:
        return Member(
            member_id=own.member_id,
            role="mover",
            address=address,
            state="draining" if stop.is_set() else "serving",
            started_unix_ms=started_unix_ms,
            protocol_version=PROTOCOL_VERSION,
            pool_id=own.spec.pool_id,
            model=own.spec.model,
            engine=mover.bandwidths,
        )

    log.info("mover_ready", member_id=own.member_id, pool_id=own.spec.pool_id, address=address)
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(RegistryHeartbeat(members, describe).keep()),
                tasks.create_task(mover.follow_movers()),
                tasks.create_task(own.kept.keep()),
            ]
            staying = tasks.create_task(mover.keep_membership())
            stopping = tasks.create_task(stop.wait())
            await asyncio.wait([staying, stopping], return_when=asyncio.FIRST_COMPLETED)
            for task in (*running, staying, stopping):
                task.cancel()
    except* (WorkerFenced, UnknownWorker) as errors:
        log.error("mover_given_up", member_id=own.member_id, reason=str(errors.exceptions[0]))


def _end_process(reason: str) -> NoReturn:
    """End the process at once: what may still land can end in no other way, and the block manager
    gives its blocks to others only after the process has exited."""
    log.critical("read_broken", reason=reason)
    faulthandler.dump_traceback()
    os._exit(EXIT_FAULT)
