"""The gRPC service of the decode worker: its one stream."""

from quire.v1 import decode_pb2, decode_pb2_grpc
from services.decode.worker import DecodeWorker
from services.worker.process import WorkerRole
from services.worker.stream import WorkerStream


class DecodeService(WorkerStream, decode_pb2_grpc.DecodeServicer):
    response = decode_pb2.DecodeConnectResponse


ROLE = WorkerRole(
    service_name=decode_pb2.DESCRIPTOR.services_by_name["Decode"].full_name,
    make=DecodeWorker,
    service=DecodeService,
    add=decode_pb2_grpc.add_DecodeServicer_to_server,
)
