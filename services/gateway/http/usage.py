"""/v1/usage: what tenants used in the last hours, tokens of all gateways and block-seconds."""

import time
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from blockstore.errors import StoreUnavailable
from blockstore.registry import Registry
from blockstore.store import NO_TENANT
from services.gateway.access.caller import EVERYONE, current_caller
from services.gateway.http.answering.sending import Json
from services.runtime.usage import KEPT_S, used_since

_MINUTE_S = 60
"""Usage is counted by the minute, and the clock of a client may differ by as much."""


def usage_route(registry: Registry) -> Route:
    async def usage(request: Request) -> Response:
        """Callers see their own tenant; where keys are on, operators see all."""
        now_s, caller = time.time(), current_caller(EVERYONE)
        try:
            since_s = float(request.query_params.get("since") or now_s - 3600)
            if since_s < now_s - KEPT_S - _MINUTE_S:
                ago = f"{(now_s - since_s) / 3600:,.1f} hours ago"
                text = f"usage is kept for {KEPT_S // 3600} hours, and since is {ago}"
                raise HTTPException(HTTPStatus.BAD_REQUEST, text)
            if since_s > now_s + _MINUTE_S:
                raise HTTPException(HTTPStatus.BAD_REQUEST, "since is in the future")
            used = await used_since(registry, since_s)
        except ValueError as error:
            raise HTTPException(HTTPStatus.BAD_REQUEST, "since is no Unix time") from error
        except StoreUnavailable as error:
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, str(error)) from error
        data = [
            {
                "tenant": tenant,
                "block_seconds": each.block_ms / 1000,
                "prompt_tokens": each.prompt_tokens,
                "cached_tokens": each.cached_tokens,
                "completion_tokens": each.generated_tokens,
            }
            for tenant, each in sorted(used.items(), key=lambda one: (-one[1].block_ms, one[0]))
            if caller.is_operator or tenant == (caller.tenant or NO_TENANT)
        ]
        since = int(since_s // 60) * 60
        return Json({"object": "usage", "since": since, "until": int(now_s), "data": data})

    return Route("/v1/usage", usage)
