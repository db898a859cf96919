"""The gRPC service `Adapters`: loads and unloads LoRA adapters, for operators."""

from typing import Any

from grpc import aio

from quire.v1 import adapters_pb2, adapters_pb2_grpc
from services.gateway.access.audit import audited
from services.gateway.workers.adapters import GatewayAdapters

SERVICE_NAME: str = adapters_pb2.DESCRIPTOR.services_by_name["Adapters"].full_name


class AdaptersService(adapters_pb2_grpc.AdaptersServicer):
    def __init__(self, adapters: GatewayAdapters) -> None:
        self._adapters = adapters

    async def LoadAdapter(
        self, request: adapters_pb2.LoadAdapterRequest, context: aio.ServicerContext[Any, Any]
    ) -> adapters_pb2.LoadAdapterResponse:
        with audited("LoadAdapter", request):
            loaded = await self._adapters.load(request.name, request.path, request.model)
        return adapters_pb2.LoadAdapterResponse(model=loaded.model)

    async def UnloadAdapter(
        self, request: adapters_pb2.UnloadAdapterRequest, context: aio.ServicerContext[Any, Any]
    ) -> adapters_pb2.UnloadAdapterResponse:
        with audited("UnloadAdapter", request):
            await self._adapters.unload(request.name)
        return adapters_pb2.UnloadAdapterResponse()
