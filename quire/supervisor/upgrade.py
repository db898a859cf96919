"""Replaces the services of a run by processes of the installed version, without a lost request."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path

from quire.async_client import AsyncClient
from quire.errors import QuireError
from quire.reports import Upgrade
from quire.sockets import living_sockets, operations_socket, socket_of
from quire.supervisor.child import Child, ChildSpec, Stage
from quire.supervisor.models import ROLES
from quire.supervisor.roles import Roles
from quire.supervisor.worker_scaler import WorkerScaler

_POLL_S = 0.1
GATEWAY_START_S, WORKER_START_S, STORE_START_S = 60.0, 600.0, 60.0
"""The longest that a new process may take until it serves; a large model takes minutes to load."""


class _Failed(Exception):
    """A new process does not serve."""


class Upgrader:
    """Upgrades a run, once at a time. `children` are all services that the run has ever started,
    `start` starts one more, and `specs` has the services' specs by name. `hand_over` lets the
    installed supervisor take this one's place; it raises ServeError if that is not possible.

    A new process of a gateway or a worker serves before the old one leaves, so nobody waits:

        supervisor       its process becomes the installed version, which goes on from here
        gateways         the new process takes the new connections; the old one ends its requests
        block manager,   they start again; no request needs the one, and a request whose pull fails
        movers           is computed
        workers          a prefill and a decode worker of each model at a time, so that a pool of
                         other weights or of another layout has both before the old ones leave;
                         the old ones' requests move
        store            it starts again, empty, and is rebuilt from workers and stamps

    The supervisor comes first because the installed version knows with which settings its services
    start, and because nothing has changed if it does not start. The gateways come next because a
    new one serves only if it understands the old workers. The store comes last, so that the new
    workers rebuild it, with their own functions, and the block manager has copies of what is
    retained. If a new process does not serve, it ends, the upgrade ends, and the old ones go on.
    """

    def __init__(
        self,
        children: Sequence[Child],
        start: Callable[[ChildSpec], Child],
        scaler: WorkerScaler,
        roles: Roles,
        run: Path,
        specs: Mapping[str, ChildSpec],
        hand_over: Callable[[], Awaitable[None]],
    ) -> None:
        self._children = children
        self._start = start
        self._scaler = scaler
        self._roles = roles
        self._run = run
        self._specs = specs
        self._hand_over = hand_over
        self._task: asyncio.Task[None] | None = None
        self._steps: list[str] = []

    @property
    def upgrade(self) -> Upgrade:
        """The upgrade that is going on, or the last one."""
        task, failure = self._task, ""
        is_running = task is not None and not task.done()
        if task is not None and task.done() and not task.cancelled() and task.exception():
            failure = str(task.exception()) or repr(task.exception())
        return Upgrade(tuple(self._steps), is_running, failure)

    def begin(self) -> None:
        """Begin an upgrade, unless one is going on."""
        if not self.upgrade.is_running:
            self._steps = []
            self._task = asyncio.create_task(self._upgrade(), name="upgrade")

    def resume(self) -> None:
        """Go on with the upgrade in which this supervisor took the place of another one."""
        self._steps = [f"the supervisor is version {version('quire-serve')}, in the same process."]
        self._task = asyncio.create_task(self._replace_services(), name="upgrade")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _upgrade(self) -> None:
        """Begin with the supervisor. An error of any kind is the upgrade's failure."""
        await self._hand_over()
        raise _Failed("the run ends")

    async def _replace_services(self) -> None:
        """Replace every service. An error of any kind ends it, and is the upgrade's failure."""
        movers = [each for each in self._staying(Stage.WORKER) if not each.spec.role]
        for old in self._staying(Stage.GATEWAY):
            await self._replace_gateway(old)
        for old in self._staying(Stage.BLOCK_MANAGER) + movers:
            old.restart(self._spec(old))
            self._steps.append(f"{old.name} starts again.")
        await self._roles.follow()
        for olds in self._worker_pairs():
            await self._replace_workers(olds)
        await self._replace_store()

    def _spec(self, old: Child) -> ChildSpec:
        """The spec by which the installed version starts a service that is no worker."""
        return self._specs.get(old.name, old.spec)

    def _staying(self, stage: Stage) -> list[Child]:
        return [each for each in self._children if each.spec.stage is stage and each.is_staying]

    def _worker_pairs(self) -> Iterator[list[Child]]:
        """Yield a prefill and a decode worker of a model at a time, or one of them if the model has
        no more of the others."""
        workers = [each for each in self._staying(Stage.WORKER) if each.spec.role]
        for model in dict.fromkeys(each.spec.model for each in workers):
            of_model = [each for each in workers if each.spec.model == model]
            roles = [[each for each in of_model if each.role == role] for role in ROLES]
            for pair in zip_longest(*roles):
                yield [each for each in pair if each is not None]

    async def _replace_gateway(self, old: Child) -> None:
        new = self._start(self._spec(old))

        async def serves() -> bool:
            path = socket_of(self._run, new.pid)
            if path is None:
                return False
            async with AsyncClient(f"unix:{path}") as client:
                return await client.is_ready()

        await self._wait_until([new], serves, GATEWAY_START_S)
        path = socket_of(self._run, new.pid)
        if path is not None:
            port = int(old.spec.environment["QUIRE_GATEWAY_PORT"])
            path.replace(operations_socket(self._run, socket.gethostname(), port))
        old.retire()
        self._steps.append(
            f"{new.name} serves; its old process takes no new requests, and ends with its last one."
        )

    async def _replace_workers(self, olds: Sequence[Child]) -> None:
        news = [self._scaler.start_worker(old.role, old.spec.model) for old in olds]
        names = {new.name for new in news}

        async def serve() -> bool:
            async with AsyncClient(f"unix:{living_sockets(self._run)[-1]}") as client:
                workers = await client.workers()
            return names <= {each.name for each in workers if each.state == "serving"}

        await self._wait_until(news, serve, WORKER_START_S)
        for old in olds:
            old.drain()
        await asyncio.gather(*(old.ended() for old in olds))
        pairs = zip(news, olds, strict=True)
        self._steps += [
            f"{new.name} serves in place of {old.name}, which has left." for new, old in pairs
        ]

    async def _replace_store(self) -> None:
        store = next(iter(self._staying(Stage.STORE)), None)
        if store is None:
            self._steps.append("the store is not of this run, and stays as it is.")
            return
        clock, old = asyncio.get_running_loop().time, store.pid
        began, before = clock(), await self._registered()
        store.restart(self._spec(store))

        async def is_rebuilt() -> bool:
            return store.pid not in (old, None) and before <= await self._registered()

        await self._wait_until([store], is_rebuilt, STORE_START_S)
        self._steps.append(f"{store.name} runs anew; it was rebuilt in {clock() - began:.1f} s.")

    async def _registered(self) -> set[str]:
        """Return the workers that serve, and their pools that are complete. Raises QuireError."""
        async with AsyncClient(f"unix:{living_sockets(self._run)[-1]}") as client:
            workers = [each for each in await client.workers() if each.state == "serving"]
            complete = {each.pool_id for each in await client.pools() if not each.recovering}
        return {each.name for each in workers} | {each.pool_id for each in workers} & complete

    async def _wait_until(
        self, news: Sequence[Child], serve: Callable[[], Awaitable[bool]], limit_s: float
    ) -> None:
        """Wait until the new processes serve. _Failed if one does not; then all but a store end."""
        try:
            async with asyncio.timeout(limit_s):
                while not await _answers(serve):
                    for new in news:
                        if new.failure:
                            raise _Failed(f"{new.name} does not start: {new.failure}")
                    await asyncio.sleep(_POLL_S)
        except (TimeoutError, _Failed) as error:
            for new in news:
                if new.spec.stage is not Stage.STORE:
                    new.drain()
            names = " and ".join(new.name for new in news)
            text = str(error) or f"{names} did not serve after {limit_s:g} s; its log says why"
            raise _Failed(text) from error


async def _answers(serve: Callable[[], Awaitable[bool]]) -> bool:
    """Whether `serve` says so; False if the gateway or the block manager does not answer."""
    try:
        return await serve()
    except (QuireError, IndexError):
        return False
