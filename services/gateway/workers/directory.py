"""The worker directory: finds workers in the registry, connects to them, and groups them by model
and pool."""

import asyncio
import gc
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from blockstore.errors import BlockStoreError, StoreLost
from blockstore.records import PoolSpec
from blockstore.registry import Member, Registry, Role
from blockstore.store import BlockStore
from services.gateway.workers.models.catalog import Model
from services.gateway.workers.movers import Movers
from services.gateway.workers.pool import Pool
from services.gateway.workers.worker import Worker
from services.model.config.model_config import ModelConfig
from services.runtime.errors import StartupError
from services.runtime.grace_timer import GraceTimer
from services.runtime.logging import get_logger
from services.runtime.ticks import until_tick

log = get_logger(__name__)

ABSENT_S = 5.0
"""How long a connected worker may be missing from the registry before it is removed: the registry
may have lost its registration."""

_STARTING_POLL_S = 0.05
"""The longest time between two reads of the registry while a worker starts, since requests may wait
for it."""


class Connection(Protocol):
    """A worker and the connection to it (`workers.connection.WorkerConnection`)."""

    worker: Worker

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ModelPools:
    """A model, and the pools that serve it, also those whose workers are not connected now."""

    model: Model
    max_model_len: int
    pools: tuple[Pool, ...]

    @property
    def longest_request(self) -> int:
        """The most tokens of a prompt + generation: the context, or the room of the largest pool if
        that is less."""
        room = max(spec.num_blocks * spec.block_size for spec in self.specs)
        return min(self.max_model_len, room)

    @property
    def specs(self) -> tuple[PoolSpec, ...]:
        return tuple(pool.spec for pool in self.pools)

    @property
    def max_slots(self) -> int | None:
        """The most decode slots that one decode worker has; None without a decode worker."""
        return max((pool.max_slots for pool in self.pools if pool.decode), default=None)


class WorkerDirectory:
    """The workers in the registry, each with a connection.

    `connect` opens the connection to a worker; `load` reads a model's directory (StartupError);
    `on_change` is called when a worker comes, goes, begins to drain or proves unusable.
    """

    def __init__(
        self,
        registry: Registry,
        store: BlockStore,
        connect: Callable[[Member], Connection],
        load: Callable[[str], Model],
        on_change: Callable[[], None],
        poll_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        gateway_id: str = "",
        movers: Movers | None = None,
    ) -> None:
        self._registry = registry
        self._store = store
        self._connect = connect
        self._load = load
        self._on_change = on_change
        self._poll_s = poll_s
        self._gateway_id = gateway_id
        self._movers = movers or Movers(b"")
        self.another_gateway_serves = False
        """Whether another gateway serves, at which this gateway's clients can continue."""
        self._connections: dict[tuple[str, Role], Connection] = {}
        """The connections, by the worker's id and the role in which it is used."""
        self._specs: dict[str, PoolSpec] = {}
        self._models: dict[str, Model] = {}
        self.unusable: dict[str, str] = {}
        """Why a worker's pool or model cannot be read, by worker."""
        self._absent = GraceTimer[tuple[str, Role]](ABSENT_S, clock)
        self._woken = asyncio.Event()
        self.starting: tuple[Member, ...] = ()
        """The workers that load their model."""
        self.block_managers: tuple[Member, ...] = ()

    # ── queries ──────────────────────────────────────────────────────────────────────────────────

    @property
    def workers(self) -> list[Worker]:
        return [connection.worker for connection in self._connections.values()]

    def served(self, name: str) -> ModelPools | None:
        """The model `name` and its pools; None if the directory has no worker of this model."""
        members = [worker.member for worker in self.workers if worker.member.model == name]
        if not members:
            return None
        return ModelPools(
            self._models[members[0].model_dir],
            min(member.max_model_len for member in members),
            tuple(self._pool(pool_id) for pool_id in sorted({m.pool_id for m in members})),
        )

    def spec(self, pool_id: str) -> PoolSpec | None:
        return self._specs.get(pool_id)

    def configs(self) -> dict[str, ModelConfig]:
        """The configs of the models that have a worker in the directory, by name."""
        members = (worker.member for worker in self.workers)
        return {member.model: self._models[member.model_dir].config for member in members}

    def warm_up(self) -> None:
        """Prepare, in the background, what only some requests need of the models."""
        for model in self._models.values():
            model.structures.warm_up()

    def model_names(self) -> tuple[str, ...]:
        """The names of the models that have a worker in the directory, sorted."""
        return tuple(sorted({worker.member.model for worker in self.workers}))

    def complete_pools(self, name: str) -> tuple[Pool, ...]:
        """The pools of a model with at least one decode worker that takes work, and one prefill
        worker: on the pool itself, or on a pool from which a mover can copy."""
        pools = self._pools(name)
        return tuple(pool for pool in pools if pool.decode and self._is_fed(pool, pools))

    def prefill_pools(self, name: str) -> tuple[Pool, ...]:
        """The pools of a model with a prefill worker that takes work."""
        return tuple(pool for pool in self._pools(name) if pool.prefill)

    def _missing_roles(self, name: str) -> list[str]:
        pools = self._pools(name)
        roles = {
            "prefill": any(pool.prefill for pool in pools),
            "decode": any(pool.decode for pool in pools),
        }
        return [role for role, is_there in roles.items() if not is_there]

    def is_starting(self, name: str) -> bool:
        """Whether workers of all roles that a model lacks are starting, such as after a crash."""
        missing = set(self._missing_roles(name))
        starting = {
            role for member in self.starting if member.model == name for role in member.roles
        }
        return bool(missing) and missing <= starting

    def missing(self, name: str) -> str:
        """Why a model has no complete pool."""
        if missing := self._missing_roles(name):
            return f"no {' and no '.join(missing)} worker serves {name!r} now"
        return (
            f"the prefill and the decode workers of {name!r} are in different pools now, and no "
            "mover copies from one to the other"
        )

    def _pools(self, name: str) -> tuple[Pool, ...]:
        served = self.served(name)
        return served.pools if served else ()

    def _is_fed(self, pool: Pool, pools: tuple[Pool, ...]) -> bool:
        target, bandwidth = pool.spec.pool_id, self._movers.bandwidth
        return bool(pool.prefill) or any(
            other.prefill and bandwidth(other.spec.pool_id, target) for other in pools
        )

    def decode_workers(self) -> dict[str, tuple[Worker, ...]]:
        """The connected decode workers by pool id, including those that drain."""
        pools: dict[str, tuple[Worker, ...]] = {}
        for worker in self.workers:
            if worker.member.role == "decode" and worker.connected:
                pools[worker.member.pool_id] = (*pools.get(worker.member.pool_id, ()), worker)
        return pools

    def parked_lookup_workers(self, name: str) -> tuple[tuple[Worker, PoolSpec], ...]:
        """The decode workers of a model that may hold a request which another gateway left, each
        with its pool's spec: also draining workers, but no unresponsive ones."""
        return tuple(
            (worker, self._specs[worker.member.pool_id])
            for worker in self.workers
            if (worker.member.role, worker.member.model) == ("decode", name)
            and worker.connected
            and not worker.unresponsive
        )

    def ready(self) -> bool:
        return any(self.complete_pools(name) for name in self.model_names())

    def forget_refusals(self) -> None:
        """Let every decode worker be asked for slots again, since a slot of another gateway may
        have become free."""
        for worker in self.workers:
            worker.forget_refusals()

    def _pool(self, pool_id: str) -> Pool:
        workers = [w for w in self.workers if w.member.pool_id == pool_id and w.usable]
        return Pool(
            self._specs[pool_id],
            tuple(w for w in workers if w.member.role == "prefill"),
            tuple(w for w in workers if w.member.role == "decode"),
        )

    # ── following the registry ───────────────────────────────────────────────────────────────────

    async def watch(self) -> None:
        """Follow the registry until cancelled. Raises StoreLost if the server has lost its data."""
        try:
            while True:
                try:
                    await self.refresh()
                except StoreLost:
                    raise
                except BlockStoreError as error:
                    log.warning("registry_unread", reason=str(error))
                with suppress(TimeoutError):
                    async with asyncio.timeout(until_tick(self._pause_s())):
                        await self._woken.wait()
                self._woken.clear()
        finally:
            await self.close()

    def look_again(self) -> None:
        """Read the registry at once: a worker has connected, disconnected or begun to drain."""
        self._woken.set()

    def _pause_s(self) -> float:
        """Seconds until the next read of the registry; shorter while workers start, change their
        role or none serve, since requests may wait for them."""
        if self.starting or any(one.draining and not one.connected for one in self.workers):
            return min(self._poll_s, _STARTING_POLL_S)
        return self._poll_s if self.ready() else self._poll_s / 2

    async def refresh(self) -> None:
        """Read the registry, and add and remove workers accordingly. Raises
        BlockStoreError."""
        members = await self._registry.members()
        if self._movers.follow(members):
            self._on_change()
        self.block_managers = tuple(m for m in members if m.role == "block_manager")
        self.another_gateway_serves = any(
            (member.role, member.state) == ("gateway", "serving")
            and member.member_id != self._gateway_id
            for member in members
        )
        workers = [member for member in members if member.role in ("prefill", "decode")]
        known, self.starting = self.starting, tuple(m for m in workers if m.state == "starting")
        serving = [m for m in workers if m.state != "starting"]
        present = {(m.member_id, role): replace(m, role=role) for m in serving for role in m.roles}
        if self.starting != known:
            self._on_change()
        absent = self._connections.keys() - present.keys()
        ids = {member.member_id for member in serving}
        # It has another role now, at a new address, if it is there and not in this role.
        gone = {
            key for key in absent if key[0] in ids or not self._connections[key].worker.connected
        }
        for key in self._absent.check(absent) | gone:
            await self._remove(key)
        for member in present.values():
            await self._add_or_update(member)
        for member in self.starting:  # an error is logged once the worker serves
            with suppress(StartupError):
                await self._read_model(member.model_dir)

    async def close(self) -> None:
        for key in tuple(self._connections):
            await self._remove(key)
        await self._movers.close()

    async def _add_or_update(self, member: Member) -> None:
        key = member.member_id, member.role
        known = self._connections.get(key)
        if known is not None:
            if member.state == "draining" and not known.worker.draining:
                known.worker.draining = True
                self._on_change()
        elif await self._load_spec_and_model(member):
            log.info("worker_found", worker_id=member.member_id, role=member.role)
            self._connections[key] = self._connect(member)
            self._on_change()

    async def _remove(self, key: tuple[str, Role]) -> None:
        log.info("worker_gone", worker_id=key[0], role=key[1])
        connection = self._connections.pop(key)
        self._drop_unused()
        await connection.close()
        self._on_change()

    async def _read_model(self, directory: str) -> None:
        if directory not in self._models:
            self._models[directory] = await asyncio.to_thread(self._load, directory)
            gc.collect()
            gc.freeze()  # otherwise each full collection visits all of it, and blocks for 0.1 s

    async def _load_spec_and_model(self, member: Member) -> bool:
        """Load the spec of the worker's pool, and its model, before the worker gets requests.
        False: one of them cannot be read, now or at all."""
        try:
            if member.pool_id not in self._specs:
                self._specs[member.pool_id] = (await self._store.stats(member.pool_id)).spec
            await self._read_model(member.model_dir)
        except StoreLost:
            raise
        except (BlockStoreError, StartupError) as error:
            if member.member_id not in self.unusable:
                self.unusable[member.member_id] = str(error)
                log.error("worker_unusable", worker_id=member.member_id, reason=str(error))
                self._on_change()
            return False
        self.unusable.pop(member.member_id, None)
        return True

    def _drop_unused(self) -> None:
        members = [worker.member for worker in self.workers]
        self._specs = {m.pool_id: self._specs[m.pool_id] for m in members}
        self._models = {m.model_dir: self._models[m.model_dir] for m in members}
