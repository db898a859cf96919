"""The roles that the workers of a run have now, which gateways know."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from quire.async_client import AsyncClient
from quire.errors import QuireError
from quire.reports import Worker
from quire.sockets import living_sockets
from quire.supervisor.child import Child

_ANSWER_S = 2.0
"""How long a gateway may take to list the workers, or a worker to begin to take a role."""


class Roles:
    """Follows and changes the roles of a run's workers, over a gateway with a socket in the
    directory `run`. `children` are all services that the run has ever started."""

    def __init__(self, children: Sequence[Child], run: Path) -> None:
        self._children = children
        self._run = run

    async def follow(self) -> Mapping[str, Worker]:
        """Note the roles that workers have taken. Returns the workers that serve, by name; none if
        no gateway answers. A worker that drains may be about to take the role that `change` has
        noted."""
        serving: dict[str, Worker] = {}
        with suppress(QuireError, TimeoutError):
            async with asyncio.timeout(_ANSWER_S), self._client() as client:
                workers = await client.workers()
            for child in self._children:
                for worker in workers:
                    if (worker.name, worker.pid, worker.state) == (
                        child.name,
                        child.pid,
                        "serving",
                    ):
                        child.role, serving[child.name] = worker.role, worker
        return serving

    async def change(self, wanted: Iterable[tuple[Worker, str]]) -> Mapping[str, str]:
        """Let each worker take a role. Returns the new roles by name. A worker that refuses or does
        not answer stays as it is."""
        changed: dict[str, str] = {}
        for worker, role in wanted:
            with suppress(QuireError, TimeoutError):
                async with asyncio.timeout(_ANSWER_S), self._client() as client:
                    await client.change_role(worker.worker_id, role)
                changed[worker.name] = role
        for child in self._children:
            child.role = changed.get(child.name, child.role)
        return changed

    def _client(self) -> AsyncClient:
        """A client of the newest gateway."""
        sockets = living_sockets(self._run)
        return AsyncClient(f"unix:{sockets[-1] if sockets else ''}")
