"""A worker's registration in the registry.

It begins before the worker loads its model, so that gateways can read the tokenizer meanwhile.
"""

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from blockstore.redis_store import RedisStore
from blockstore.registry import Member, Registry, Role, State
from quire.worker_names import new_worker_id
from services.protocol.version import PROTOCOL_VERSION
from services.protocol.worker_stream import RELOAD
from services.runtime import redis
from services.runtime.registry_heartbeat import RegistryHeartbeat
from services.worker.config import WorkerSettings

if TYPE_CHECKING:  # these modules import torch
    from services.worker.loading import LoadedModel
    from services.worker.pool_worker import PoolWorker


@asynccontextmanager
async def registered(
    settings: WorkerSettings, role: Role, patience_s: float
) -> AsyncIterator["Registration"]:
    """Register a worker under a new id, renew the registration, and withdraw it at the end.

    It waits `patience_s` for Redis at the start. Raises if Redis is not there by then, or if the
    registry is lost later.
    """
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as vital:
        # Running requests hold blocks, so the worker waits for the store without limit.
        store, registry = await redis.connect(
            settings, stack, store_retry_for_s=math.inf, patience_s=patience_s
        )
        registration = Registration(settings, role, store, registry)
        renewing = vital.create_task(registration.heartbeat.keep())
        yield registration
        renewing.cancel()


class Registration:
    """A worker's entry in the registry, and the worker's connection to the store."""

    def __init__(
        self, settings: WorkerSettings, role: Role, store: RedisStore, registry: Registry
    ) -> None:
        self.store = store
        self.heartbeat = RegistryHeartbeat(registry, self._describe)
        self._worker: PoolWorker[Any] | None = None
        self._member = Member(
            member_id=new_worker_id(settings.service, settings.worker_number),
            role=role,
            address="",
            state="starting",
            pid=os.getpid(),
            started_unix_ms=time.time_ns() // 1_000_000,
            protocol_version=PROTOCOL_VERSION,
            model=settings.served_name,
            model_dir=str(settings.model.resolve()),
            mix=settings.mix and role == "decode",
        )
        self._mixes = settings.mix

    @property
    def worker_id(self) -> str:
        return self._member.member_id

    @property
    def serving(self) -> bool:
        """Whether the worker serves, so that gateways may have requests at it."""
        return self._worker is not None

    @property
    def draining(self) -> bool:
        return self._worker is not None and self._worker.draining

    @property
    def leaving(self) -> bool:
        return self._worker is not None and self._worker.draining and not self._worker.next_role

    def forget_worker(self) -> bool:
        """Drop the worker, which has ended, and return whether it has left for new weights. No
        garbage collection visits this object, so it would keep the worker's model in memory."""
        reloads = self._worker is not None and self._worker.next_role == RELOAD
        self._worker = None
        return reloads

    def set_serving(
        self, worker: "PoolWorker[Any]", role: Role, address: str, loaded: "LoadedModel"
    ) -> None:
        """Report from now on that the worker serves, in this role at this address."""
        self._worker = worker
        mix = self._mixes and role == "decode"
        self._member = replace(
            self._member,
            role=role,
            address=address,
            state="serving",
            pool_id=worker.pool_id,
            max_model_len=loaded.limits.max_model_len,
            max_num_seqs=loaded.limits.max_num_seqs,
            engine=loaded.engine | ({"mix": "true"} if mix else {}),
            mix=mix,
        )
        self.heartbeat.changed()

    def _describe(self) -> Member:
        if self._worker is None:
            return self._member
        state: State = "draining" if self.draining else "serving"
        return replace(self._member, state=state, load=self._worker.load())
