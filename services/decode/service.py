"""The gRPC service of the decode worker: its one stream."""

from collections.abc import AsyncIterator
from typing import Any

from quire.v1 import decode_pb2, decode_pb2_grpc
from services.common.rpc.transport import RpcServer
from services.decode.worker import DecodeWorker
from services.worker.process import WorkerRole
from services.worker.stream import WorkerStream


class DecodeService(decode_pb2_grpc.DecodeServicer):
    def __init__(self, worker: DecodeWorker) -> None:
        self._stream = WorkerStream(worker, decode_pb2.DecodeConnectResponse)

    async def Connect(
        self, request_iterator: AsyncIterator[decode_pb2.DecodeConnectRequest], context: Any
    ) -> AsyncIterator[Any]:
        async for response in self._stream.serve(request_iterator):
            yield response


def _serve(worker: DecodeWorker, server: RpcServer) -> None:
    decode_pb2_grpc.add_DecodeServicer_to_server(DecodeService(worker), server.aio)


ROLE = WorkerRole(
    service_name=decode_pb2.DESCRIPTOR.services_by_name["Decode"].full_name,
    make=DecodeWorker,
    serve=_serve,
)
