"""The gateway's process: connect to Redis, open both front doors, follow the workers, leave."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from prometheus_client import CollectorRegistry

from blockstore.registry import Member
from quire.v1 import inference_pb2_grpc
from services.common import redis
from services.common.logging import get_logger
from services.common.metrics import metrics_endpoint
from services.common.presence import Presence
from services.common.rpc import RpcServer
from services.gateway import service
from services.gateway.assembly import Assembly, assembled, keep_health
from services.gateway.config import GatewaySettings
from services.gateway.dispatcher import Limits
from services.gateway.figures import Figures
from services.gateway.http.app import create_app
from services.gateway.http.server import http_server
from services.gateway.relay import BLOCK_MANAGER, SUPERVISOR, Relay
from services.gateway.secret import deployment_secret
from services.gateway.service import InferenceService

_HINT_LIMIT_S = 0.5
"""For what the block store knows of prefixes; a request can be placed without it."""
_FAREWELL_S = 1.0
"""For answers that are on their way out when everything has ended."""

log = get_logger(__name__)


async def serve(settings: GatewaySettings, stop: asyncio.Event) -> None:
    """Until `stop`; then what runs gets its grace. Raises when the store is lost: another gateway
    process begins with the new one."""
    metrics = CollectorRegistry()
    configured = settings.secret.get_secret_value() if settings.secret else None
    secret = deployment_secret(configured, settings.secret_file, settings.run_dir)
    limits = Limits(
        settings.max_waiting,
        settings.patience_s,
        settings.reserve_timeout_s,
        settings.rebalance_s,
        settings.read_window_s,
    )
    async with AsyncExitStack() as stack:
        store, registry = await redis.connect(
            settings, stack, _HINT_LIMIT_S, settings.store_patience_s
        )
        stack.enter_context(metrics_endpoint(settings, metrics))
        assembly = await stack.enter_async_context(
            assembled(
                store,
                registry,
                secret,
                limits,
                Figures(metrics),
                settings.poll_s,
                settings.silence_s,
                report_cached_tokens=settings.report_cached_tokens,
            )
        )
        server, port = await _grpc_server(settings, assembly, stack)
        http = await stack.enter_async_context(AsyncExitStack())
        http_port = await _http_server(settings, assembly, metrics, http)
        # Whatever ends the process: clients hear of it before their connections break.
        stack.push_async_callback(assembly.dispatcher.close)
        started_unix_ms = time.time_ns() // 1_000_000
        presence = Presence(
            registry,
            lambda: assembly.describe(
                settings.address(port), started_unix_ms, stopping=stop.is_set()
            ),
        )
        log.info("gateway_listening", port=port, http_port=http_port)
        async with _in_background(presence, assembly, server):
            await stop.wait()
            presence.changed()
            await _leave(assembly, server, http, settings.request_grace_s)


async def _leave(
    assembly: Assembly, server: RpcServer, http: AsyncExitStack, grace_s: float
) -> None:
    """Both front doors take nothing new; what is not done after the grace is told so."""
    closing = asyncio.gather(server.stop(grace_s + _FAREWELL_S), http.aclose())
    await asyncio.wait([closing], timeout=grace_s)
    await assembly.dispatcher.close()
    await closing


@asynccontextmanager
async def _in_background(
    presence: Presence, assembly: Assembly, server: RpcServer
) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(presence.keep(), name="presence"),
            tasks.create_task(keep_health(assembly, server, presence), name="health"),
        ]
        yield
        for task in running:
            task.cancel()


async def _grpc_server(
    settings: GatewaySettings, assembly: Assembly, stack: AsyncExitStack
) -> tuple[RpcServer, int]:
    server = RpcServer(service.SERVICE_NAME, BLOCK_MANAGER.name, SUPERVISOR.name)
    inference = InferenceService(assembly.gateway)
    inference_pb2_grpc.add_InferenceServicer_to_server(inference, server.aio)
    for relay in (
        Relay(BLOCK_MANAGER, lambda: _address(assembly.fleet.block_manager)),
        Relay(SUPERVISOR, lambda: settings.supervisor),
    ):
        stack.push_async_callback(relay.close)
        server.aio.add_generic_rpc_handlers((relay.handlers(),))
    port = await server.start(settings.host, settings.port)
    stack.push_async_callback(server.stop, _FAREWELL_S)
    return server, port


def _address(member: Member | None) -> str | None:
    return member.address if member else None


async def _http_server(
    settings: GatewaySettings,
    assembly: Assembly,
    metrics: CollectorRegistry,
    stack: AsyncExitStack,
) -> int | None:
    if settings.http_port is None:
        return None
    app = create_app(assembly.gateway, metrics)
    serving = http_server(
        app, settings.host, settings.http_port, settings.request_grace_s + _FAREWELL_S
    )
    return await stack.enter_async_context(serving)
