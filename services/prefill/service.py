"""The gRPC service of the prefill worker: its one stream."""

from quire.v1 import prefill_pb2, prefill_pb2_grpc
from services.prefill.worker import PrefillWorker
from services.worker.process import WorkerRole
from services.worker.stream import WorkerStream


class PrefillService(WorkerStream, prefill_pb2_grpc.PrefillServicer):
    response = prefill_pb2.PrefillConnectResponse


ROLE = WorkerRole(
    service_name=prefill_pb2.DESCRIPTOR.services_by_name["Prefill"].full_name,
    make=PrefillWorker,
    service=PrefillService,
    add=prefill_pb2_grpc.add_PrefillServicer_to_server,
)
