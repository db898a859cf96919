"""Serves gRPC server reflection in both versions, v1 and v1alpha.

grpcio-reflection serves only v1alpha, but clients ask for v1 first. Both versions have the same
messages, with different names.
"""

from collections.abc import Sequence

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc import aio
from grpc_reflection.v1alpha import reflection, reflection_pb2
from grpc_reflection.v1alpha.reflection import aio as servicers

SERVICE_NAME_V1 = "grpc.reflection.v1.ServerReflection"


def enable_reflection(services: Sequence[str], server: aio.Server) -> None:
    """Enable reflection on a server. `services` are full names; reflection lists its own two
    services too."""
    pool = descriptor_pool.Default()
    _add_descriptor(pool)
    names = (*services, reflection.SERVICE_NAME, SERVICE_NAME_V1)
    reflection.enable_server_reflection(names, server, pool)
    servicer = servicers.ReflectionServicer(names, pool)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handlers = {"ServerReflectionInfo": handler}
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE_NAME_V1, handlers),)
    )


def _add_descriptor(pool: descriptor_pool.DescriptorPool) -> None:
    """Add the descriptor of v1, so that clients can ask for it. May be called again."""
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    text = text_format.MessageToString(file).replace("v1alpha", "v1")
    pool.Add(text_format.Parse(text, descriptor_pb2.FileDescriptorProto()))
