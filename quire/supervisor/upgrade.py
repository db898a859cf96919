"""Replaces the services of a run by processes of the installed version, without a lost request."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

from quire.async_client import AsyncClient
from quire.errors import QuireError
from quire.reports import Upgrade
from quire.sockets import living_sockets, operations_socket
from quire.supervisor.child import Child, ChildSpec, Stage
from quire.supervisor.models import ROLES
from quire.supervisor.roles import Roles
from quire.supervisor.worker_scaler import WorkerScaler

_POLL_S = 0.1
GATEWAY_START_S, WORKER_START_S = 60.0, 600.0
"""The longest that a new process may take until it serves; a large model takes minutes to load."""


class _Failed(Exception):
    """A new process does not serve."""


class Upgrader:
    """Upgrades a run, once at a time. `children` are all services that the run has ever started,
    and `start` starts one more.

    A new process of a gateway or a worker serves before the old one leaves, so nobody waits:

        gateways         the new process takes the new connections; the old one ends its requests
        block manager,   they start again; no request needs the one, and a request whose pull fails
        movers           is computed
        workers          a prefill and a decode worker of each model at a time, so that a pool of
                         other weights or of another layout has both before the old ones leave;
                         the old ones' requests move

    The gateways come first because a new one serves only if it understands the old workers. If a
    new process does not serve, it ends, the upgrade ends, and the old ones go on. The store and the
    supervisor itself are not replaced.
    """

    def __init__(
        self,
        children: Sequence[Child],
        start: Callable[[ChildSpec], Child],
        scaler: WorkerScaler,
        roles: Roles,
        run: Path,
    ) -> None:
        self._children = children
        self._start = start
        self._scaler = scaler
        self._roles = roles
        self._run = run
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

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _upgrade(self) -> None:
        """Replace every service. An error of any kind ends it, and is the upgrade's failure."""
        movers = [each for each in self._staying(Stage.WORKER) if not each.spec.role]
        for old in self._staying(Stage.GATEWAY):
            await self._replace_gateway(old)
        for old in self._staying(Stage.BLOCK_MANAGER) + movers:
            old.restart()
            self._steps.append(f"{old.name} starts again.")
        await self._roles.follow()
        for olds in self._worker_pairs():
            await self._replace_workers(olds)

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
        port = int(old.spec.environment["QUIRE_GATEWAY_PORT"])
        path = operations_socket(self._run, socket.gethostname(), port)
        of_old = _inode(path)
        new = self._start(old.spec)

        async def serves() -> bool:
            if _inode(path) == of_old:
                return False
            async with AsyncClient(f"unix:{path}") as client:
                return await client.is_ready()

        await self._wait_until([new], serves, GATEWAY_START_S)
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

    async def _wait_until(
        self, news: Sequence[Child], serve: Callable[[], Awaitable[bool]], limit_s: float
    ) -> None:
        """Wait until the new processes serve. _Failed, after ending them, if one does not."""
        try:
            async with asyncio.timeout(limit_s):
                while not await _answers(serve):
                    for new in news:
                        if new.failure:
                            raise _Failed(f"{new.name} does not start: {new.failure}")
                    await asyncio.sleep(_POLL_S)
        except (TimeoutError, _Failed) as error:
            for new in news:
                new.drain()
            names = " and ".join(new.name for new in news)
            text = str(error) or f"{names} did not serve after {limit_s:g} s; its log says why"
            raise _Failed(text) from error


def _inode(path: Path) -> int:
    """The number of the file, or 0 if there is none."""
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return 0


async def _answers(serve: Callable[[], Awaitable[bool]]) -> bool:
    """Whether `serve` says so; False if the gateway or the block manager does not answer."""
    try:
        return await serve()
    except (QuireError, IndexError):
        return False
