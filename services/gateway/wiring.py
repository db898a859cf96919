"""Creates the gateway's parts and connects them."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from blockstore.registry import Load, Member, Registry, State
from blockstore.store import BlockStore
from services.gateway.config import PartOptions
from services.gateway.gateway import Gateway
from services.gateway.output.parser.choice import Parsers
from services.gateway.request.metrics import RequestMeters
from services.gateway.request.records import Records, block_hashes
from services.gateway.request.request import Request
from services.gateway.scheduling.dispatcher import Dispatcher
from services.gateway.scheduling.explainer import Explainer
from services.gateway.scheduling.migration import Migration
from services.gateway.scheduling.router import Router
from services.gateway.workers.adapters import GatewayAdapters
from services.gateway.workers.change_notifier import ChangeNotifier
from services.gateway.workers.connection import WorkerConnection, WorkerEventSink
from services.gateway.workers.directory import Connection, WorkerDirectory
from services.gateway.workers.models.catalog import load_model
from services.gateway.workers.models.generation_config import GenerationConfig
from services.gateway.workers.movers import Movers
from services.protocol.version import PROTOCOL_VERSION
from services.runtime.registry_heartbeat import RegistryHeartbeat
from services.runtime.rpc.tls import TlsFiles
from services.runtime.rpc.transport import RpcServer
from services.runtime.secret import Secret

if TYPE_CHECKING:
    from services.runtime.tracing.tracer import Tracer

Connect = Callable[[Member, WorkerEventSink], Connection]
"""Opens the connection to a worker, whose events go to the sink."""


@dataclass(frozen=True, slots=True)
class Wiring:
    """The parts of a running gateway."""

    gateway_id: str
    gateway: Gateway
    directory: WorkerDirectory
    dispatcher: Dispatcher
    changes: ChangeNotifier
    explainer: Explainer
    adapters: GatewayAdapters | None

    def describe(self, address: str, started_unix_ms: int, *, stopping: bool) -> Member:
        """The gateway's own registration."""
        state: State = "serving" if self.gateway.ready() else "starting"
        return Member(
            member_id=self.gateway_id,
            role="gateway",
            address=address,
            state="draining" if stopping else state,
            started_unix_ms=started_unix_ms,
            protocol_version=PROTOCOL_VERSION,
            load=Load(
                num_running=self.dispatcher.num_running, num_waiting=self.dispatcher.num_waiting
            ),
        )


@asynccontextmanager
async def start_gateway(
    store: BlockStore,
    registry: Registry,
    secret: Secret,
    options: PartOptions,
    request_metrics: RequestMeters,
    connect: Connect | None = None,
    tls: TlsFiles | None = None,
    tracer: "Tracer | None" = None,
) -> AsyncIterator[Wiring]:
    """Yield a gateway that follows the registry until the block is left. An error of a background
    task (StoreLost) is raised in the block, as an exception group.

    `connect` opens the connection to a worker; None opens it over gRPC, with `tls` if given. No
    request is traced without `tracer`. Raises StartupError if the options' generation_config is
    wrong.
    """
    generation = GenerationConfig.read(
        options.generation_config, options.override_generation_config
    )
    parsers = Parsers(options.tool_call_parser, options.reasoning_parser)
    gateway_id = f"gateway-{secrets.token_hex(4)}"
    changes = ChangeNotifier()

    def connect_over_grpc(member: Member, sink: WorkerEventSink) -> Connection:
        return WorkerConnection(member, gateway_id, secret.rpc_key, sink, options.silence_s, tls)

    connect_to = connect or connect_over_grpc
    movers = Movers(secret.rpc_key, tls)
    directory = WorkerDirectory(
        registry,
        store,
        connect=lambda member: connect_to(member, dispatcher),
        load=partial(load_model, generation=generation, parsers=parsers),
        on_change=changes.notify,
        poll_s=options.poll_s,
        gateway_id=gateway_id,
        movers=movers,
    )
    router = Router(store, secret.root, movers.bandwidth)
    records = Records()

    def on_end(request: Request, error: Exception | None) -> None:
        request_metrics.record_end(request, error)
        request.record.hashes = block_hashes(request)
        records.add(request.record)
        if request.trace is not None:
            request.trace.end(request.record.outcome, error, request.output.stats)

    dispatcher = Dispatcher(directory, router, registry, options, changes, on_end, movers.pull)
    request_metrics.set_gauges(lambda: dispatcher.num_running, lambda: dispatcher.num_waiting)
    adapters = None
    if options.max_loras:
        adapters = GatewayAdapters(registry, directory.configs, options)
    explainer = Explainer(dispatcher, directory, router, records)
    gateway = Gateway(
        directory, dispatcher, changes, request_metrics, options, explainer, tracer, adapters
    )
    async with asyncio.TaskGroup() as tasks:
        migration = Migration(directory, dispatcher, changes, options.reserve_timeout_s)
        work = {"registry": directory.watch(), "drain workers": migration.drain_workers()}
        if adapters is not None:
            work["adapters"] = adapters.watch(changes.notify)
        if options.rebalance_s:
            work["rebalance"] = migration.rebalance(options.rebalance_s)
        background = [tasks.create_task(each, name=name) for name, each in work.items()]
        try:
            yield Wiring(gateway_id, gateway, directory, dispatcher, changes, explainer, adapters)
        finally:
            await dispatcher.close()
            for task in background:
                task.cancel()


async def update_health(
    wiring: Wiring, servers: Sequence[RpcServer], heartbeat: RegistryHeartbeat
) -> None:
    """Keep health checks and the registry up to date, until cancelled: the gateway serves while a
    model has a pool with at least one prefill and one decode worker."""
    serving = False
    while True:
        seen = wiring.changes.num_changes
        if (ready := wiring.gateway.ready()) != serving:
            serving = ready
            for server in servers:
                await server.set_serving(serving)
            heartbeat.changed()
        if serving:
            wiring.directory.warm_up()
        await wiring.changes.wait(seen)
