"""The gRPC service of the decode worker: protobuf in, calls of `DecodeWorker`; events out."""

from collections.abc import AsyncIterator
from typing import Any

from quire.v1 import decode_pb2, decode_pb2_grpc
from services.common.rpc.transport import RpcServer
from services.decode.worker import DecodeWorker
from services.protocol.codec import check_request_id, ticket_from_wire
from services.worker.process import WorkerRole
from services.worker.stream import StreamSession, WorkerStream

Command = decode_pb2.Reserve | decode_pb2.Admit | decode_pb2.HandOver | decode_pb2.Resume


class DecodeService(decode_pb2_grpc.DecodeServicer):
    def __init__(self, worker: DecodeWorker) -> None:
        self._worker = worker
        self._stream = WorkerStream(worker, decode_pb2.DecodeConnectResponse, self._execute)

    async def Connect(
        self, request_iterator: AsyncIterator[decode_pb2.DecodeConnectRequest], context: Any
    ) -> AsyncIterator[Any]:
        async for response in self._stream.serve(request_iterator):
            yield response

    def _execute(self, session: StreamSession, command: Command) -> None:
        match command:
            case decode_pb2.Reserve(
                request_id=request_id, attempt=attempt, num_sequences=num_sequences
            ):
                check_request_id(request_id)
                self._worker.reserve(session, request_id, attempt, num_sequences)
            case decode_pb2.HandOver(request_id=request_id, attempt=attempt):
                self._worker.hand_over(session, request_id, attempt)
            case decode_pb2.Resume(ticket=ticket):
                self._worker.resume(session, ticket_from_wire(ticket))
            case decode_pb2.Admit(ticket=ticket, suspect=suspect):
                self._worker.admit(session, ticket_from_wire(ticket), suspect=suspect)


def _serve(worker: DecodeWorker, server: RpcServer) -> None:
    decode_pb2_grpc.add_DecodeServicer_to_server(DecodeService(worker), server.aio)


ROLE = WorkerRole(
    service_name=decode_pb2.DESCRIPTOR.services_by_name["Decode"].full_name,
    make=DecodeWorker,
    serve=_serve,
)
