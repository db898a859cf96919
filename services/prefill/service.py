"""The gRPC service of the prefill worker: its one stream."""

from collections.abc import AsyncIterator
from typing import Any

from quire.v1 import prefill_pb2, prefill_pb2_grpc
from services.common.rpc.transport import RpcServer
from services.prefill.worker import PrefillWorker
from services.worker.process import WorkerRole
from services.worker.stream import WorkerStream


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    def __init__(self, worker: PrefillWorker) -> None:
        self._stream = WorkerStream(worker, prefill_pb2.PrefillConnectResponse)

    async def Connect(
        self, request_iterator: AsyncIterator[prefill_pb2.PrefillConnectRequest], context: Any
    ) -> AsyncIterator[Any]:
        async for response in self._stream.serve(request_iterator):
            yield response


def _serve(worker: PrefillWorker, server: RpcServer) -> None:
    prefill_pb2_grpc.add_PrefillServicer_to_server(PrefillService(worker), server.aio)


ROLE = WorkerRole(
    service_name=prefill_pb2.DESCRIPTOR.services_by_name["Prefill"].full_name,
    make=PrefillWorker,
    serve=_serve,
)
