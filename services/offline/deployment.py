"""A deployment inside one process: one gateway, one prefill and one decode worker on one pool.

The parts are those of the services. Only what lies between the processes is replaced:

    gRPC streams    calls (`services.offline.connection`)
    Redis           `MemoryStore` and `MemoryRegistry`
    CPU sharing     a lock: the two workers take turns on all CPUs, step by step
"""

import asyncio
import math
import os
import shutil
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal

from prometheus_client import CollectorRegistry
from pydantic import ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from blockstore.memory_registry import MemoryRegistry
from blockstore.memory_store import MemoryStore
from blockstore.registry import Member, Role
from services.engine.batch import Row, Wait
from services.engine.forward import Flight, ForwardPass
from services.engine.runner import Runner
from services.gateway.config import GatewayOptions
from services.gateway.request_metrics import RequestMetrics
from services.gateway.wiring import Wiring, start_gateway
from services.offline.connection import LocalConnection
from services.offline.folder import locked_folder
from services.protocol.version import PROTOCOL_VERSION
from services.runtime.errors import StartupError
from services.runtime.metrics import WorkerMetrics
from services.runtime.secret import Secret
from services.worker.adapters import WorkerAdapters
from services.worker.config import WorkerSettings
from services.worker.drafting import speculation
from services.worker.grammars import Grammars
from services.worker.loading import LoadedModel, load
from services.worker.membership import Membership, join
from services.worker.pool_engine import WorkerParts
from services.worker.pool_worker import PoolWorker
from services.worker.roles import ROLES

MAX_WAITING = 1 << 20
_NUM_WARM_UP_TOKENS = 32
POOL_ROOT = Path("/dev/shm")
"""Shared memory, as for the pools of a service: a pool needs pages that stay."""


class OfflineSettings(WorkerSettings):
    """The settings of both workers. They come from the caller alone, not from the environment."""

    service: ClassVar[Literal["prefill", "decode"]] = "decode"
    num_expected_workers: int = len(ROLES)
    """The default pool has the same size as under `quire serve` with a worker of each role."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


def offline_settings(**values: Any) -> WorkerSettings:
    """Check the settings of an offline deployment; None takes the default. Raises StartupError."""
    try:
        return OfflineSettings(
            **{name: value for name, value in values.items() if value is not None}
        )
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"])) or "settings"
        raise StartupError(f"{name}: {first['msg']}") from error


class TurnTaking:
    """The forward pass of one of two workers, which compute on the same CPUs: one step at a
    time."""

    def __init__(self, forward: ForwardPass, turn: threading.Lock) -> None:
        self._forward = forward
        self._turn = turn

    def launch(
        self, rows: Sequence[Row], copies: Sequence[tuple[int, int]] = (), num_waiting: int = 0
    ) -> Flight:
        with self._turn:
            flight = self._forward.launch(rows, copies, num_waiting)
            flight.result()
            return flight

    def yield_device(self, wait: Wait) -> None: ...

    def on_idle(self) -> None: ...


@asynccontextmanager
async def offline_deployment(settings: WorkerSettings) -> AsyncIterator[Wiring]:
    """Load the model, and yield the parts of a gateway that serves it until the block is left.

    Blocks the event loop while it loads. Raises StartupError. An error of a worker is raised in the
    block, as an exception group.
    """
    if settings.device != "cpu":
        raise StartupError(
            f"device {settings.device}: a pool on a GPU needs a block manager; use `quire serve`"
        )
    loaded = load(settings, progress=lambda: None)
    async with AsyncExitStack() as stack:
        root = stack.enter_context(locked_folder(POOL_ROOT))
        store, turn = MemoryStore(), threading.Lock()
        running = await stack.enter_async_context(asyncio.TaskGroup())
        registry, workers = MemoryRegistry(time.time), dict[str, PoolWorker[Any]]()
        for role, kind in ROLES.items():
            worker_id = f"offline-{role}"
            membership = await join(store, "offline", root, loaded.layout, worker_id, loaded.plan)
            stack.callback(membership.close)
            worker = PoolWorker[Any](_parts(settings, role, loaded, membership, turn), kind)
            for work in (worker.run(), membership.complete_memory()):
                stack.callback(running.create_task(work).cancel)
            workers[worker_id] = worker
            await registry.announce(_member(role, membership, loaded, settings), math.inf)
        starting = start_gateway(
            store,
            registry,
            Secret(os.urandom(32)),
            _gateway_options(settings),
            RequestMetrics(CollectorRegistry()),
            lambda member, sink: LocalConnection(member, workers[member.member_id], sink),
        )
        wiring = await stack.enter_async_context(starting)
        while not wiring.gateway.ready():
            for reason in wiring.directory.unusable.values():
                raise StartupError(reason)
            await wiring.changes.wait(wiring.changes.num_changes)
        # Both workers have opened the pool's files. Without names, their memory is free as soon as
        # this process ends, however it ends.
        shutil.rmtree(root)
        yield wiring


def _gateway_options(settings: WorkerSettings) -> GatewayOptions:
    return GatewayOptions(
        client_priority=True,
        max_waiting=MAX_WAITING,
        report_cached_tokens=True,
        rebalance_s=0.0,
        max_loras=settings.max_loras,
        max_lora_rank=settings.max_lora_rank,
    )


def _parts(
    settings: WorkerSettings,
    role: Role,
    loaded: LoadedModel,
    membership: Membership,
    turn: threading.Lock,
) -> WorkerParts:
    runner = Runner(loaded.model, membership.pool.kv, loaded.layout.block_size, loaded.ops)
    runner.warm_up(_NUM_WARM_UP_TOKENS, loaded.limits.max_num_seqs)
    limits, metrics = loaded.limits, WorkerMetrics(CollectorRegistry())
    return WorkerParts(
        *(membership.store, membership, TurnTaking(runner, turn), limits, metrics),
        adapters=(
            WorkerAdapters(
                *(loaded.model.whole_config, loaded.model.load_adapter),
                *(settings.max_loras, settings.max_lora_rank),
            )
            if settings.max_loras
            else None
        ),
        grammars=Grammars(settings.model, limits.vocab_size, limits.eos_token_ids),
        speculation=(
            speculation(settings, loaded.draft, lambda draft: TurnTaking(draft, turn).launch)
            if role == "decode"
            else None
        ),
    )


def _member(
    role: Role, membership: Membership, loaded: LoadedModel, settings: WorkerSettings
) -> Member:
    return Member(
        member_id=membership.worker_id,
        role=role,
        address="",
        state="serving",
        started_unix_ms=time.time_ns() // 1_000_000,
        protocol_version=PROTOCOL_VERSION,
        pool_id=membership.spec.pool_id,
        model=loaded.layout.model,
        model_dir=str(settings.model),
        max_model_len=loaded.limits.max_model_len,
        max_num_seqs=loaded.limits.max_num_seqs,
        engine=loaded.engine,
    )
