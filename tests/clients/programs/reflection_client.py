"""A gRPC client that knows only reflection, like grpcurl: lists services, fetches descriptors, and
calls Generate with messages made of them.

usage: reflection_client.py ADDRESS QUESTION MAX_TOKENS, with the expected text on standard input.
"""

import sys

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

address, question, max_tokens = sys.argv[1:4]
expected = sys.stdin.read()
SERVICE = "quire.v1.Inference"

with grpc.insecure_channel(address) as channel:
    database = ProtoReflectionDescriptorDatabase(channel)
    services = set(database.get_services())
    assert SERVICE in services, services
    assert "grpc.health.v1.Health" in services, services
    pool = DescriptorPool(database)
    method = pool.FindServiceByName(SERVICE).FindMethodByName("Generate")
    request = GetMessageClass(method.input_type)()
    request.chat.messages.add(role="user", content=question)
    request.sampling.max_tokens = int(max_tokens)
    request.sampling.temperature = 0.0
    call = channel.unary_stream(
        f"/{SERVICE}/Generate",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=GetMessageClass(method.output_type).FromString,
    )
    text = "".join(delta.text for response in call(request) for delta in response.deltas)
assert text == expected, (text, expected)
