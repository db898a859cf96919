"""The block maps of all pools, which the block manager follows while this gateway asks."""

from collections.abc import Iterable
from typing import Any

from quire.v1 import block_manager_pb2 as pb
from services.gateway.access.audit import audited
from services.gateway.grpc.relay import Relay
from services.gateway.identity import client_id
from services.gateway.scheduling.dispatcher import Dispatcher
from services.protocol.ticket import first_holder_id
from services.runtime.errors import QuireError

_TIMEOUT_S = 2.0
_MAX_POOLS = 16
_MAX_SHARES = 20


class BlockMaps:
    """The part `pools` of the document."""

    def __init__(self, relay: Relay, dispatcher: Dispatcher) -> None:
        self._relay = relay
        self._dispatcher = dispatcher
        self._request_of: dict[str, str] = {}
        """The client's ids of this gateway's requests, by holder."""
        self.pools: dict[str, dict[str, Any]] = {}
        self.is_current = False

    async def update(self) -> None:
        """Read all maps. Without an answer, `pools` stays and `is_current` is False."""
        request = pb.WatchBlocksRequest()
        try:
            answer = pb.WatchBlocksResponse.FromString(
                await self._relay.send("WatchBlocks", request.SerializeToString(), _TIMEOUT_S)
            )
        except QuireError:
            self.is_current = False
            return
        running = self._dispatcher.requests
        self._request_of = {each.tickets.holder_id: client_id(each.id) for each in running}
        maps = answer.maps[:_MAX_POOLS]
        self.is_current = True
        self.pools = {each.pool.pool_id: self._pool(each) for each in maps}

    async def describe(self, pool_id: str, cell: int) -> list[dict[str, Any]]:
        request = pb.DescribeBlocksRequest(pool_id=pool_id, cell=cell)
        answer = pb.DescribeBlocksResponse.FromString(
            await self._relay.send("DescribeBlocks", request.SerializeToString(), _TIMEOUT_S)
        )
        return [
            {
                "id": block.block_id,
                "state": block.state,
                "num_holders": block.num_holders,
                "prefix_hash": block.prefix_hash.hex(),
                "cached_at": block.cached_at if block.HasField("cached_at") else None,
                "holders": [self._name(each) or each for each in block.holder_ids],
            }
            for block in answer.blocks
        ]

    async def audit(self) -> None:
        """Audit all pools; the next update has the results."""
        request = pb.AuditRequest()
        with audited("Audit", request):
            await self._relay.send("Audit", request.SerializeToString(), timeout_s=60.0)

    def _name(self, holder_id: str) -> str:
        """The client's id of a holder's request; "" if it is not a request of this gateway."""
        return self._request_of.get(first_holder_id(holder_id), "")

    def _pool(self, block_map: pb.BlockMap) -> dict[str, Any]:
        pool = block_map.pool
        view = {
            "model": pool.model,
            "num_blocks": pool.num_blocks,
            "block_size": pool.block_size,
            "block_bytes": pool.block_bytes,
            "free": pool.num_free,
            "cached": pool.num_cached,
            "held": pool.num_held,
            "retained": pool.num_retained,
            "num_holders": pool.num_holders,
            "waiters": pool.num_waiters,
            "queries": pool.num_prefix_queries,
            "hits": pool.num_prefix_hits,
            "recovering": pool.recovering,
            "shares": {each.tenant: each.num_blocks for each in _most_first(pool.shares)},
            "fenced": list(block_map.fenced_worker_ids),
            "blocks_per_cell": block_map.blocks_per_cell,
            "age_s": block_map.age_s,
            "cells": {str(cell.index): _counts(cell) for cell in block_map.cells},
            "holders": {str(each.slot): self._holder(each.holder) for each in block_map.holders},
        }
        if block_map.HasField("last_audit"):
            view["audit"] = _audit(block_map.last_audit, block_map.last_audit_age_s)
        return view

    def _holder(self, holder: pb.Holder) -> dict[str, Any]:
        return {
            "id": holder.holder_id,
            "request": self._name(holder.holder_id),
            "worker": holder.worker_id,
            "blocks": holder.num_blocks,
        }


def _most_first(shares: Iterable[pb.PoolShare]) -> list[pb.PoolShare]:
    """The tenants that use blocks, those that use most first."""
    used = (share for share in shares if share.num_blocks)
    return sorted(used, key=lambda share: (-share.num_blocks, share.tenant))[:_MAX_SHARES]


def _audit(audit: pb.PoolAudit, age_s: float) -> dict[str, Any]:
    return {
        "age_s": age_s,
        "checked": audit.ledger_checked,
        "references": audit.num_references,
        "violations": list(audit.violations[:20]),
    }


def _counts(cell: pb.BlockCell) -> list[int]:
    """The counts as the page reads them: unread, cached, held, shared, quarantined, holder,
    second."""
    return [
        cell.num_unread,
        cell.num_cached,
        cell.num_held,
        cell.num_shared,
        cell.num_quarantined,
        cell.holder_slot,
        cell.changed_s,
    ]
