"""The gRPC service of the prefill worker: protobuf in, calls of `PrefillWorker`; events out."""

from collections.abc import AsyncIterator
from typing import Any

from quire.v1 import prefill_pb2, prefill_pb2_grpc
from services.common.rpc.transport import RpcServer
from services.prefill.worker import PrefillWorker
from services.protocol.codec import ticket_from_wire
from services.protocol.sampling_codec import num_top_from_wire
from services.worker.process import WorkerRole
from services.worker.stream import StreamSession, WorkerStream


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    def __init__(self, worker: PrefillWorker) -> None:
        self._worker = worker
        self._stream = WorkerStream(worker, prefill_pb2.PrefillConnectResponse, self._execute)

    async def Connect(
        self, request_iterator: AsyncIterator[prefill_pb2.PrefillConnectRequest], context: Any
    ) -> AsyncIterator[Any]:
        async for response in self._stream.serve(request_iterator):
            yield response

    def _execute(self, session: StreamSession, submit: prefill_pb2.PrefillSubmit) -> None:
        asks = submit.HasField("prompt_logprobs")
        num_top = num_top_from_wire(submit.prompt_logprobs) if asks else None
        ticket = ticket_from_wire(submit.ticket)
        self._worker.submit(session, ticket, num_top, suspect=submit.suspect)


def _serve(worker: PrefillWorker, server: RpcServer) -> None:
    prefill_pb2_grpc.add_PrefillServicer_to_server(PrefillService(worker), server.aio)


ROLE = WorkerRole(
    service_name=prefill_pb2.DESCRIPTOR.services_by_name["Prefill"].full_name,
    make=PrefillWorker,
    serve=_serve,
)
