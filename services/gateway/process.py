"""The gateway's process: connects to Redis, listens for clients and operators, follows the
workers, and shuts down within a grace time."""

import asyncio
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass
from typing import NoReturn

from prometheus_client import CollectorRegistry, Gauge
from starlette.routing import Route

from blockstore.errors import BlockStoreError
from blockstore.registry import Registry, Role
from blockstore.store import BlockStore
from quire.sockets import remove_dead_sockets, starting_socket
from quire.v1 import adapters_pb2_grpc, inference_pb2_grpc
from quire.v1.block_manager_pb2 import DrainWorkerRequest
from services.gateway.access.guards import KeyGuard
from services.gateway.access.keyring import Keyring
from services.gateway.config import GatewaySettings
from services.gateway.dashboard.routes import Dashboard
from services.gateway.grpc import service
from services.gateway.grpc.adapters import SERVICE_NAME as ADAPTERS
from services.gateway.grpc.adapters import AdaptersService
from services.gateway.grpc.relay import BLOCK_MANAGER, SUPERVISOR, Relay, Target
from services.gateway.grpc.service import InferenceService
from services.gateway.http.adapters import adapter_routes
from services.gateway.http.app import create_app
from services.gateway.http.connections import ConnectionLimits, Departure
from services.gateway.http.server import http_server
from services.gateway.http.usage import usage_route
from services.gateway.output.output import MAX_STALL_S
from services.gateway.request.metrics import RequestMeters
from services.gateway.scheduling.planner import Planner
from services.gateway.wiring import Wiring, start_gateway, update_health
from services.runtime import open_files, redis
from services.runtime.exposition import metrics_endpoint
from services.runtime.health import Health
from services.runtime.logging import get_logger
from services.runtime.metrics_socket import WithServices
from services.runtime.registry_heartbeat import RegistryHeartbeat
from services.runtime.rpc.tls import service_tls
from services.runtime.rpc.transport import RpcServer
from services.runtime.secret import Secret, deployment_secret
from services.runtime.ticks import until_tick
from services.runtime.tracing.opening import open_tracer
from services.runtime.usage import write_usage

_HINT_LIMIT_S = 0.5
"""How long a lookup of cached prefixes in the block store is tried again. The router can place a
request without the answer."""
_STORE_PATIENCE_S = 30.0
"""How long a new request waits while Redis is away. In less time a server starts again, or its
replica takes over."""
RETIRE_S = 3600.0
"""The longest that a gateway's requests go on after another process has taken its place; the
supervisor then ends it."""
_DRAIN_LIMIT_S = 10.0
"""How long the block manager may take to tell a worker its next role."""
_USAGE_INTERVAL_S = 5.0
_LAST_WRITES_S = 1.0
"""How long the servers run after all requests have ended, to write the last answers."""

log = get_logger(__name__)


async def serve(settings: GatewaySettings, stop: asyncio.Event) -> None:
    """Run a gateway until `stop` is set; then running requests have `request_grace_s` to finish.

    Raises StoreLost if the store has lost its data: a new gateway process then starts with the new
    store.
    """
    metrics = CollectorRegistry()
    secret = deployment_secret(settings)
    async with AsyncExitStack() as stack:
        store, registry = await redis.connect(settings, stack, _HINT_LIMIT_S, _STORE_PATIENCE_S)
        health = Health()
        scrapes = stack.enter_context(ExitStack())
        scrapes.enter_context(
            metrics_endpoint(settings, metrics, health, shares_port=settings.http_fd is not None)
        )
        request_metrics = RequestMeters(metrics)
        tracer = stack.enter_context(open_tracer(settings, settings.otlp_endpoint))
        wiring = await stack.enter_async_context(
            start_gateway(
                store,
                registry,
                secret,
                settings.options,
                request_metrics,
                tls=service_tls(settings),
                tracer=tracer,
            )
        )
        keyring = settings.keyring(metrics)
        relays = _relays(settings, wiring, secret, stack)
        listeners = _Listeners(settings, wiring, keyring, relays, health, stack)
        server, port = await listeners.open_public()
        operations = await listeners.open_operations(port)
        http = await stack.enter_async_context(AsyncExitStack())
        dashboard = Dashboard(
            settings.dashboard,
            wiring,
            request_metrics.metrics,
            relays[0],
            host=settings.host,
            keyring=keyring,
        )
        routes = [*dashboard.routes(), usage_route(registry)]
        if wiring.adapters is not None:
            routes += adapter_routes(wiring.adapters)
        departure = Departure()
        http_port = await listeners.open_http(metrics, routes, http, departure)
        if http_port is None:
            departure.ended.set()
        # However the process ends, clients get an error before their connections break.
        stack.push_async_callback(wiring.dispatcher.close)
        started_unix_ms = time.time_ns() // 1_000_000
        heartbeat = RegistryHeartbeat(
            registry,
            lambda: wiring.describe(
                settings.address(port),
                started_unix_ms,
                stopping=stop.is_set() or departure.begun.is_set(),
            ),
        )
        log.info("gateway_listening", port=port, http_port=http_port)
        async with asyncio.TaskGroup() as tasks:
            following = update_health(wiring, (server, operations), heartbeat)
            gauge = request_metrics.metrics.recommended_workers
            planner = _planner(settings, wiring, registry, store, gauge, relays[0])
            works = [
                heartbeat.keep(),
                following,
                dashboard.document.keep_history(),
                planner.follow(),
                _write_usage(registry, wiring.gateway_id, request_metrics),
            ]
            background = [tasks.create_task(work) for work in works]
            if keyring is not None:
                background.append(tasks.create_task(keyring.watch(), name="API keys"))
            retiring = _retire(wiring, server, departure, heartbeat, scrapes, stop)
            background.append(tasks.create_task(retiring))
            await stop.wait()
            heartbeat.changed()
            dashboard.feed.close()
            await _shut_down(wiring, server, http, settings.request_grace_s)
            for task in background:
                task.cancel()


async def _write_usage(registry: Registry, source: str, metrics: RequestMeters) -> NoReturn:
    began_s = time.time()

    async def write(limit_s: float) -> None:
        with suppress(BlockStoreError, TimeoutError):
            async with asyncio.timeout(limit_s):
                await write_usage(registry, source, began_s, metrics.used)

    try:
        while True:
            await write(_USAGE_INTERVAL_S)
            await asyncio.sleep(until_tick(_USAGE_INTERVAL_S))
    finally:
        await write(_LAST_WRITES_S)


async def _retire(
    wiring: Wiring,
    server: RpcServer,
    departure: Departure,
    heartbeat: RegistryHeartbeat,
    scrapes: ExitStack,
    stop: asyncio.Event,
) -> None:
    """Leave the ports to another process at SIGUSR1, and set `stop` when the last request and the
    last HTTP connection have ended. Clients of gRPC go to the other process with their next call,
    clients of HTTP when they have the answer to their next request."""
    retiring = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, retiring.set)
    await retiring.wait()
    log.info("gateway_retiring", num_requests=len(wiring.dispatcher.requests))
    departure.begun.set()
    heartbeat.changed()
    stopping = asyncio.create_task(server.stop(RETIRE_S))
    await asyncio.to_thread(scrapes.close)
    await departure.ended.wait()
    await wiring.dispatcher.wait_until_idle(RETIRE_S)
    stop.set()
    await stopping


async def _shut_down(
    wiring: Wiring, server: RpcServer, http: AsyncExitStack, grace_s: float
) -> None:
    """Stop the gRPC and the HTTP server. Neither takes new requests: HTTP answers them with 503
    while others run, so that a load balancer sends them elsewhere. Requests that still run after
    `grace_s` fail with Draining."""
    stopping = asyncio.create_task(server.stop(grace_s + _LAST_WRITES_S))
    await wiring.dispatcher.drain(grace_s)
    await wiring.dispatcher.close()
    await asyncio.gather(stopping, http.aclose())


def _relays(
    settings: GatewaySettings, wiring: Wiring, secret: Secret, stack: AsyncExitStack
) -> tuple[Relay, ...]:
    """Relays of all operations."""
    supervisors = [Target(settings.supervisor)] if settings.supervisor else []
    key, tls = secret.rpc_key, service_tls(settings)

    def block_managers() -> list[Target]:
        return [Target(each.address, each.member_id) for each in wiring.directory.block_managers]

    relays = (
        Relay(BLOCK_MANAGER, block_managers, key, tls),
        Relay(SUPERVISOR, lambda: supervisors, tls=tls),
    )
    for relay in relays:
        stack.push_async_callback(relay.close)
    return relays


def _planner(
    settings: GatewaySettings,
    wiring: Wiring,
    registry: Registry,
    store: BlockStore,
    recommended: Gauge,
    block_manager: Relay,
) -> Planner:
    async def change_role(worker_id: str, role: Role) -> None:
        request = DrainWorkerRequest(worker_id=worker_id, next_role=role)
        await block_manager.send("DrainWorker", request.SerializeToString(), _DRAIN_LIMIT_S)

    targets = settings.target_ttft_s, settings.target_inter_token_s
    num_waiting = wiring.dispatcher.num_waiting_for
    return Planner(
        wiring.gateway_id,
        registry,
        store,
        num_waiting,
        targets,
        recommended,
        change_role if settings.auto_roles else None,
    )


@dataclass(frozen=True, slots=True)
class _Listeners:
    """Opens the gateway's servers; `stack` ends those for gRPC."""

    settings: GatewaySettings
    wiring: Wiring
    keyring: Keyring | None
    relays: Sequence[Relay]
    health: Health
    stack: AsyncExitStack

    async def open_public(self) -> tuple[RpcServer, int]:
        """The server for clients. It serves operations only if keys can tell operators from
        users."""
        settings = self.settings
        server = self._server(
            has_operations=self.keyring is not None, max_connections=_max_connections()
        )
        port = await server.start(settings.host, settings.port)
        self.stack.push_async_callback(server.stop, _LAST_WRITES_S)
        return server, port

    async def open_operations(self, public_port: int) -> RpcServer:
        """Serve operators' calls on a Unix socket in the run directory, and on `operations_port` if
        one is set. The run's user also uses the models there, without a key."""
        settings = self.settings
        server = self._server(has_operations=True)
        remove_dead_sockets(settings.run_dir)
        path = starting_socket(settings.run_dir, socket.gethostname(), public_port)
        port = await server.start_local(path, "127.0.0.1", settings.operations_port)
        self.stack.push_async_callback(server.stop, _LAST_WRITES_S)
        log.info("operations_listening", socket=str(path), port=port)
        return server

    def _server(self, *, has_operations: bool, max_connections: int | None = None) -> RpcServer:
        relays = self.relays if has_operations else ()
        adapters = self.wiring.adapters if has_operations else None
        names = [relay.name for relay in relays]
        if adapters is not None:
            names.append(ADAPTERS)
        server = RpcServer(
            *(service.SERVICE_NAME, *names),
            guard=KeyGuard(self.keyring, names),
            max_connections=max_connections,
            shares_port=self.settings.http_fd is not None,
            tls=self.settings.public_tls(),
            health=self.health,
        )
        inference = InferenceService(self.wiring.gateway)
        inference_pb2_grpc.add_InferenceServicer_to_server(inference, server.aio)
        server.aio.add_generic_rpc_handlers(tuple(relay.handlers() for relay in relays))
        if adapters is not None:
            adapters_pb2_grpc.add_AdaptersServicer_to_server(AdaptersService(adapters), server.aio)
        return server

    async def open_http(
        self,
        metrics: CollectorRegistry,
        more_routes: Sequence[Route],
        stack: AsyncExitStack,
        departure: Departure,
    ) -> int | None:
        settings = self.settings
        if settings.http_port is None:
            return None
        directory = settings.metrics_directory
        app = create_app(
            self.wiring.gateway,
            metrics if directory is None else WithServices(metrics, directory),
            allowed_hosts=settings.allowed_hosts,
            keyring=self.keyring,
            cors_origins=settings.cors_origins,
            more_routes=more_routes,
        )
        limits = ConnectionLimits(
            _max_connections(),
            # A slow client may start to read again until the gateway cancels its request, so a
            # write may wait a little longer than that.
            write_timeout_s=MAX_STALL_S + _LAST_WRITES_S,
        )
        fd = settings.http_fd
        serving = http_server(
            app,
            settings.host,
            settings.http_port,
            _LAST_WRITES_S,
            limits,
            tls=settings.public_tls(),
            listening=None if fd is None else socket.socket(fileno=fd),
            departure=departure,
        )
        return await stack.enter_async_context(serving)


def _max_connections() -> int:
    """The connection limit of each of the two servers, gRPC and HTTP."""
    return min(ConnectionLimits().max_connections, open_files.room_for_connections(2))
