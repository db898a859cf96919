"""Loads and unloads LoRA adapters over HTTP, at vLLM's paths, with an operator's key
(`services.gateway.http.middleware.authentication`)."""

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.gateway.access.audit import audited
from services.gateway.http.answering.sending import Json
from services.gateway.http.bodies.reading import read_body
from services.gateway.workers.adapters import GatewayAdapters


class UnloadBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    lora_name: str


class LoadBody(UnloadBody):
    lora_path: str = Field(max_length=4096)
    base_model_name: str = ""
    load_inplace: bool = False


def adapter_routes(adapters: GatewayAdapters) -> list[Route]:
    async def load(request: Request) -> Response:
        body = await read_body(request, LoadBody)
        with audited("LoadAdapter", body.model_dump()):
            await adapters.load(
                body.lora_name, body.lora_path, body.base_model_name, replaces=body.load_inplace
            )
        return Json({"message": f"LoRA adapter {body.lora_name!r} is loaded"})

    async def unload(request: Request) -> Response:
        body = await read_body(request, UnloadBody)
        with audited("UnloadAdapter", body.model_dump()):
            await adapters.unload(body.lora_name)
        return Json({"message": f"LoRA adapter {body.lora_name!r} is unloaded"})

    return [
        Route("/v1/load_lora_adapter", load, methods=["POST"]),
        Route("/v1/unload_lora_adapter", unload, methods=["POST"]),
    ]
