"""/v1/cache: retains prefixes by name, lists them and drops them."""

import time
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from quire.types import Usage
from services.gateway.access.caller import EVERYONE, current_caller
from services.gateway.api import GenerationRequest, Generator, RequestedSampling, RetainDirective
from services.gateway.http.answering.formats import retained_json, usage_json
from services.gateway.http.answering.sending import Json
from services.gateway.http.bodies.fields import Integers
from services.gateway.http.bodies.reading import read_body
from services.gateway.http.bodies.retention import Ttl
from services.gateway.http.failures import name_request
from services.gateway.http.tokens import TokenizeBody


class CacheBody(TokenizeBody):
    """A prefix: text as `prompt`, token ids as `tokens`, or a chat as `messages`."""

    forms = "prompt", "tokens", "messages"

    name: str = Field(min_length=1)
    tokens: Integers | None = None
    ttl: Ttl = 3600
    warm: bool = True
    """Whether to compute what is not cached; without it, blocks are retained once they are."""
    cache_salt: str | None = None
    request_id: str | None = None

    def to_request(self, request_id: str) -> GenerationRequest:
        asked = self.request()
        return replace(
            asked,
            prompt=asked.prompt if self.tokens is None else tuple(self.tokens),
            request_id=self.request_id or request_id,
            sampling=RequestedSampling(max_tokens=1, temperature=0.0),
            cache_salt=self.cache_salt or "",
            add_generation_prompt=bool(self.add_generation_prompt),
            retain=(RetainDirective(self.ttl, self.name),),
        )


class CacheEndpoints:
    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    async def retained(self, request: Request) -> Response:
        return await (self._retain(request) if request.method == "POST" else self._list())

    async def _retain(self, request: Request) -> Response:
        body = await read_body(request, CacheBody)
        name_request(request, body.request_id)
        asked = body.to_request(request.state.request_id)
        if not body.warm:
            return Json(self._answer(retained_json(await self._generator.retain(asked)), None))
        usage: Usage | None = None
        async with self._generator.generate(asked) as deltas:
            async for delta in deltas:
                usage = delta.usage or usage
        assert usage is not None
        return Json(self._answer(retained_json(usage.retained[0]), usage))

    async def _list(self) -> Response:
        found = await self._generator.retained(current_caller(EVERYONE))
        data = [
            {
                "object": "cache.retention",
                "name": each.name,
                "tenant": each.tenant,
                "model": each.model,
                "pool": each.pool_id,
                "retained_tokens": each.num_tokens,
                "cached_tokens": each.num_cached_tokens,
                "expires_at": _expires_at(each.left_s),
            }
            for each in found
        ]
        return Json({"object": "list", "data": data})

    async def drop(self, request: Request) -> Response:
        name, tenant = request.path_params["name"], request.query_params.get("tenant")
        if not await self._generator.drop_retained(name, current_caller(EVERYONE), tenant):
            raise HTTPException(HTTPStatus.NOT_FOUND, f"no prefix is retained as {name!r}")
        return Json({"object": "cache.retention", "name": name, "deleted": True})

    def _answer(self, answer: dict[str, Any], usage: Usage | None) -> dict[str, Any]:
        expires_at = _expires_at(answer["ttl"]) if answer["retained_tokens"] else None
        whole = {"object": "cache.retention", **answer, "expires_at": expires_at}
        return {**whole, "usage": usage and usage_json([replace(usage, retained=())])}


def _expires_at(left_s: float) -> int:
    return round(time.time() + left_s)
