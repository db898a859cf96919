"""Retains prefixes in the block store, for requests and by name.

A tenant's retentions belong to the tenant, whichever of its keys made them; without API keys, all
belong to one owner. Budgets are blocks of one pool.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from blockstore.errors import BlockStoreError, Recovering, StoreLost, UnknownPool
from blockstore.hashing import prefix_hashes
from blockstore.records import PoolSpec
from blockstore.store import NO_TENANT
from quire.types import RetainAnswer
from services.gateway.access.caller import Caller
from services.gateway.api import RetainDirective, RetainedPrefix
from services.gateway.config import PartOptions
from services.gateway.request.request import Request
from services.gateway.scheduling.router import Router
from services.gateway.workers.directory import WorkerDirectory
from services.gateway.workers.pool import Pool
from services.runtime.logging import get_logger

log = get_logger(__name__)

MAX_SHOWN = 20


class Retention:
    """Retains prefixes, lists them and drops them."""

    def __init__(self, router: Router, workers: WorkerDirectory, options: PartOptions) -> None:
        self._router = router
        self._store = router.store
        self._workers = workers
        self._options = options

    async def apply(self, request: Request, spec: PoolSpec) -> None:
        """Retain what a request asks for in the pool that computes it. A request is answered once,
        however often it is sent out."""
        stats = request.output.stats
        if request.retain and not stats.retained:
            stats.retained = tuple([await self._retain(request, spec, d) for d in request.retain])

    async def mark(self, request: Request, pools: tuple[Pool, ...]) -> RetainAnswer:
        """Retain a prefix without computing it, in the pool that has the most of it."""
        specs = [pool.spec for pool in pools]
        cached = [await self._num_cached(request, spec) for spec in specs] if specs[1:] else [0]
        return await self._retain(request, specs[cached.index(max(cached))], request.retain[0])

    async def prefixes(self, caller: Caller) -> tuple[RetainedPrefix, ...]:
        """The retentions of the caller's tenant, or of all tenants for an operator. Raises
        BlockStoreError."""
        owner, found = _owner(caller), list[RetainedPrefix]()
        tells = self._options.report_cached_tokens or caller.tenant or caller.is_operator
        for spec in self._specs():
            for each in await self._store.retentions(spec.pool_id):
                if each.left_ms > 0 and (caller.is_operator or each.owner == owner):
                    found.append(
                        RetainedPrefix(
                            each.name,
                            "" if each.owner == NO_TENANT else each.owner,
                            spec.model,
                            spec.pool_id,
                            each.num_blocks * spec.block_size,
                            each.num_cached * spec.block_size if tells else None,
                            each.left_ms / 1000,
                        )
                    )
        return tuple(found)

    async def names(self, pool_id: str) -> list[str]:
        """The names of some of a pool's retentions, for operators; of none if the store does not
        answer."""
        try:
            found = await self._store.retentions(pool_id)
        except BlockStoreError:
            return []
        names = (f"{each.owner}/{each.name}".removeprefix(f"{NO_TENANT}/") for each in found)
        return sorted(names)[:MAX_SHOWN]

    async def drop(self, name: str, caller: Caller, tenant: str | None = None) -> bool:
        """End the retention of this name in all pools; an operator may name another tenant. Returns
        whether there was one. Raises BlockStoreError."""
        owner = tenant if tenant is not None and caller.is_operator else _owner(caller)
        ended = [
            await self._store.end_retention(spec.pool_id, owner or NO_TENANT, name)
            for spec in self._specs()
        ]
        return any(ended)

    def _specs(self) -> Iterator[PoolSpec]:
        for model in self._workers.model_names():
            served = self._workers.served(model)
            yield from served.specs if served else ()

    async def _num_cached(self, request: Request, spec: PoolSpec) -> int:
        root = self._router.root(spec, request)
        hashes = prefix_hashes(root, request.prompt_token_ids, spec.block_size)
        return await self._store.match(spec.pool_id, hashes)

    async def _retain(
        self, request: Request, spec: PoolSpec, asked: RetainDirective
    ) -> RetainAnswer:
        tokens = request.prompt_token_ids[: asked.num_tokens]
        hashes = prefix_hashes(self._router.root(spec, request), tokens, spec.block_size)
        name = asked.name or (f"auto-{hashes[-1].hex()[:16]}" if hashes else "")
        answer = RetainAnswer(name, "rejected", len(tokens), 0, asked.ttl_s)
        if not hashes:
            text = f"the prefix has {len(tokens)} tokens, less than a block of {spec.block_size}"
            return replace(answer, reason=text)
        caller = request.asked.caller
        of_pool = math.floor(self._options.retained_share * spec.num_blocks)
        of_owner = of_pool if caller.retained_blocks is None else caller.retained_blocks
        what = _owner(caller), name, 1000 * asked.ttl_s, hashes
        try:
            found = await self._store.retain(spec.pool_id, *what, (of_owner, of_pool))
        except BlockStoreError as error:
            log.warning("prefix_not_retained", pool_id=spec.pool_id, error=str(error))
            lost = isinstance(error, Recovering | StoreLost | UnknownPool)
            why = "has lost its data, and gets it back" if lost else "does not answer"
            return replace(answer, reason=f"the block store {why}; ask again later")
        answer = replace(answer, num_tokens=found.num_blocks * spec.block_size)
        if found.num_blocks == len(hashes):
            return replace(answer, status="accepted")
        text = (
            f"the prefix has {len(hashes)} blocks; this client retains {found.num_of_owner} of at "
            f"most {of_owner}, all clients {found.num_of_pool} of at most {of_pool}"
        )
        return replace(answer, status="clipped" if found.num_blocks else "rejected", reason=text)


def _owner(caller: Caller) -> str:
    return caller.tenant or NO_TENANT
