"""Explains requests: what happened to one, and what would happen to one now."""

import re
from collections.abc import Iterator
from itertools import islice

from services.gateway.access.caller import Caller
from services.gateway.identity import client_id
from services.gateway.request.record import Record
from services.gateway.request.records import MAX_RECORDS, Records, block_hashes
from services.gateway.request.request import Request
from services.gateway.request.story import Story, count, placement
from services.gateway.scheduling.dispatcher import Dispatcher
from services.gateway.scheduling.router import Route, Router, placed, rank_prefill, slots_of
from services.gateway.workers.directory import WorkerDirectory
from services.runtime.errors import UnknownRequest

_PREFIX = re.compile("^(chatcmpl-|cmpl-|resp_|msg_)")
"""The beginning of the id of an HTTP answer. HTTP also adds 8 digits to an id from a header."""
_MAX_RUNNING = 64
"""The running requests that may have computed another one's prefix: the oldest ones."""


class Explainer:
    def __init__(
        self, dispatcher: Dispatcher, directory: WorkerDirectory, router: Router, records: Records
    ) -> None:
        self._dispatcher = dispatcher
        self._directory = directory
        self._router = router
        self.records = records

    def explain(self, request_id: str, caller: Caller) -> list[str]:
        """The story of a request of this gateway. UnknownRequest: there is no record of it, or the
        caller may not see it."""
        name = _PREFIX.sub("", request_id)
        is_meant = re.compile(f"{re.escape(name)}(-[0-9a-f]{{8}})?").fullmatch
        running = self._dispatcher.requests
        wanted = (
            *(_with_hashes(each) for each in running if is_meant(client_id(each.id))),
            *(each for each in self.records if is_meant(each.request_id)),
        )
        found = next((each for each in wanted if each.is_visible_to(caller)), None)
        if found is None:
            raise UnknownRequest(
                f"no record of a request {name!r} of yours: a gateway keeps the last "
                f"{MAX_RECORDS:,} that it served itself"
            )
        others = [
            each
            for each in (*map(_with_hashes, islice(running, _MAX_RUNNING)), *self.records)
            if each.is_visible_to(caller) and each.request_id != found.request_id
        ]
        return list(Story(found, others, tells_all=caller.is_operator).sentences())

    async def forecast(self, request: Request, *, tells_cached: bool) -> list[str]:
        """Tell what would happen now to a request that was admitted, but is not queued. It asks the
        block store about all pools of the model. Raises BlockStoreError."""
        pools = [
            pool
            for pool in self._directory.complete_pools(request.model)
            if not request.capacity_problem(pool.spec)
        ]
        sources = self._directory.prefill_pools(request.model)
        routes = await self._router.routes(request, pools, sources, looks=True) if pools else []
        if not routes:
            return [f"It would wait: {self._directory.missing(request.model)}."]
        return list(self._forecast(request, routes[0], tells_cached=tells_cached))

    def _forecast(self, request: Request, route: Route, *, tells_cached: bool) -> Iterator[str]:
        num_tokens, size = len(request.prompt_token_ids), route.prefill.spec.block_size
        num_blocks = num_tokens // size + 1
        yield (
            f"The prompt has {count(num_tokens, 'token')}: {count(num_blocks, 'block')} of {size} "
            f"with the first new token. The answer may have {request.sampling.max_tokens:,} tokens."
        )
        num_queued = self._dispatcher.num_waiting_for(request.model)
        yield f"At the gateway {count(num_queued, 'request')} would wait before it."
        if tells_cached:
            num_cached = min(route.num_cached_blocks * size, num_tokens - 1)
            yield f"The prefix cache has {num_cached:,} of its tokens now."
        if not route.pool.has_open(request.sampling.width):
            yield "It would wait for decode slots."
        if num_blocks > route.num_free_blocks:
            yield (
                f"It would wait for blocks, or others would be preempted: the pool has "
                f"{route.num_free_blocks:,} that are free or can be evicted."
            )
        if ranked := rank_prefill(route, num_tokens):
            decode = slots_of(route.pool.decode)
            yield from placement(
                placed(route, ranked, decode[0][0], decode), "would go", "would get"
            )


def _with_hashes(request: Request) -> Record:
    request.record.hashes = block_hashes(request)
    return request.record
