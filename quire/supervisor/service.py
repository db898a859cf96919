"""The gRPC service quire.v1.Supervisor, on a Unix socket of the run. A process that may open the
socket may scale the run."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import grpc
from grpc import aio

from quire.supervisor.roles import Roles
from quire.supervisor.run_directory import supervisor_address
from quire.supervisor.upgrade import Upgrader
from quire.supervisor.worker_scaler import WorkerScaler
from quire.v1.supervisor_pb2 import ScaleRequest, ScaleResponse, UpgradeRequest, UpgradeResponse
from quire.v1.supervisor_pb2_grpc import SupervisorServicer, add_SupervisorServicer_to_server

_ACCEPT_PINGS = (
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 1),
)
"""Gateways keep their connection and ping it; by default a server ends such a connection."""


class SupervisorService(SupervisorServicer):
    def __init__(self, scaler: WorkerScaler, upgrader: Upgrader, roles: Roles) -> None:
        self._scaler = scaler
        self._upgrader = upgrader
        self._roles = roles
        self._lock = asyncio.Lock()

    async def Scale(self, request: ScaleRequest, context: Any) -> ScaleResponse:
        wanted = {
            "prefill": request.num_prefill if request.HasField("num_prefill") else None,
            "decode": request.num_decode if request.HasField("num_decode") else None,
        }
        if self._upgrader.upgrade.is_running and any(n is not None for n in wanted.values()):
            # Its new workers would be the first to leave.
            text = "an upgrade of this run is going on; scale it when `quire upgrade` has ended"
            await context.abort(grpc.StatusCode.UNAVAILABLE, text)
        try:
            async with self._lock:
                serving = await self._roles.follow()
                changes = self._scaler.changes(wanted, request.model, serving)
                changing = await self._roles.change(tuple(changes))
                scaled = replace(self._scaler.scale(wanted, request.model), changing=changing)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise
        return ScaleResponse(**asdict(scaled))

    async def Upgrade(self, request: UpgradeRequest, context: Any) -> UpgradeResponse:
        if request.begin:
            self._upgrader.begin()
        return UpgradeResponse(**asdict(self._upgrader.upgrade))


@asynccontextmanager
async def served(
    scaler: WorkerScaler, upgrader: Upgrader, roles: Roles, run: Path
) -> AsyncIterator[None]:
    server = aio.server(options=_ACCEPT_PINGS)
    add_SupervisorServicer_to_server(SupervisorService(scaler, upgrader, roles), server)
    server.add_insecure_port(supervisor_address(run))
    await server.start()
    try:
        yield
    finally:
        await upgrader.close()
        await server.stop(grace=None)
