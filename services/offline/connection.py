"""The connection of a gateway to a worker of the same process: calls in place of a gRPC stream."""

import asyncio
from collections.abc import Callable
from typing import Any

from blockstore.registry import Member
from services.gateway.workers.connection import WorkerEventSink, deliver
from services.gateway.workers.worker import Worker
from services.protocol.messages import Command, LoadReport, Step, WorkerEvent
from services.worker.pool_worker import PoolWorker

_REPORT_INTERVAL_S = 0.25


class LocalConnection:
    """Gives a worker the gateway's commands, and the gateway the worker's events. Each is delivered
    in a later turn of the event loop, in order, as a stream would."""

    def __init__(self, member: Member, local: PoolWorker[Any], sink: WorkerEventSink) -> None:
        self.worker = Worker(member, self._send)
        self.worker.connected = True
        self._local_worker = local
        self._sink = sink
        self._loop = asyncio.get_running_loop()
        self._reporting = asyncio.create_task(self._report_load())
        self._local_worker.sessions.add(self)

    async def close(self) -> None:
        self.finish()
        self._reporting.cancel()
        self._local_worker.sessions.discard(self)
        self._local_worker.role.close(self)
        await asyncio.wait([self._reporting])

    # The worker's view: `services.worker.requests.events.Session`.

    def send(self, event: WorkerEvent, then: Callable[[], None] | None = None) -> None:
        self._loop.call_soon(self._deliver, event, then)

    def finish(self) -> None:
        self.worker.connected = False

    def _deliver(self, event: WorkerEvent, then: Callable[[], None] | None) -> None:
        if not self.worker.connected:
            return
        for one in event.outputs if isinstance(event, Step) else (event,):
            deliver(one, self.worker, self._sink)
        if then is not None:
            then()

    async def _report_load(self) -> None:
        while True:
            local = self._local_worker
            report = LoadReport(local.role.load(), local.draining)
            deliver(report, self.worker, self._sink)
            await asyncio.sleep(_REPORT_INTERVAL_S)

    # The gateway's view: `Worker.send`.

    def _send(self, command: Command) -> None:
        self._loop.call_soon(self._local_worker.role.execute, self, command)
