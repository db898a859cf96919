"""Lets the workers of a model serve new weights, for operators.

    read      all workers read the weights at the model's path, beside those that they serve; if
              one refuses, all go on with the old ones
    switch    all workers requeue their requests and leave the old pool, and join a new one

All workers switch at once, since a pool needs both roles, and the new pool the memory of the old
one. Requests wait meanwhile, and go on from their tokens.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from blockstore.registry import Member, Registry
from quire.v1.worker_pb2 import Drain, Draining, Reload
from quire.worker_names import worker_name
from services.protocol.worker_stream import RELOAD
from services.runtime.errors import InvalidRequest, QuireError, Unavailable

_POLL_S = 0.05


class Reloader:
    """Reloads one model at a time; another call waits. `tell` sends a command to a worker, as
    `drain.tell` does. A worker has `timeout_s` to answer that it switches. It may read and start as
    long as the caller waits."""

    def __init__(self, tell: Callable[..., Awaitable[Draining]], timeout_s: float) -> None:
        self._tell = tell
        self._timeout_s = timeout_s
        self._lock = asyncio.Lock()

    async def reload(self, registry: Registry, model: str) -> Sequence[str]:
        """Serve the weights that are at the path of `model` now; it may be empty if there is only
        one. Returns the ids of the workers that serve them; none if they did so before.

        Raises InvalidRequest if the workers cannot serve the weights, and Unavailable if a worker
        starts, drains or does not answer. The weights that the workers serve have changed only if
        the error says so.
        """
        async with self._lock:
            old = await self._serving(registry, model)
            answers = await asyncio.gather(*(self._tell(each, reload=Reload()) for each in old))
            changing = [
                each for each, said in zip(old, answers, strict=True) if said.has_new_weights
            ]
            here = await self._serving(registry, model)
            if [each.address for each in here] != [each.address for each in old]:
                raise Unavailable("workers have come or gone; nothing has changed; try again")
            return await self._switch(registry, changing, len(old)) if changing else ()

    async def _serving(self, registry: Registry, model: str) -> list[Member]:
        """The workers of a model, sorted. All of them serve."""
        members = await registry.members()
        workers = [each for each in members if each.role in ("prefill", "decode")]
        names = sorted({each.model for each in workers})
        found = [each for each in workers if model in ("", each.model)]
        if not found or (len(names) > 1 and not model):
            raise InvalidRequest(f"name a model that has workers: {', '.join(names) or 'none has'}")
        for each in found:
            if each.state != "serving":
                name = worker_name(each.member_id)
                raise Unavailable(f"{name} is {each.state}; try again when it serves")
        return sorted(found, key=lambda each: each.member_id)

    async def _switch(
        self, registry: Registry, changing: Sequence[Member], num_workers: int
    ) -> Sequence[str]:
        """Let workers switch, and wait until `num_workers` serve, and none under its old id."""
        told = [self._tell(each, drain=Drain(next_role=RELOAD)) for each in changing]
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.gather(*told)
        except (QuireError, TimeoutError) as error:
            reason = str(error) or "no answer"
            text = f"some workers may serve the old weights ({reason}): reload again"
            raise Unavailable(text) from error
        old = {each.member_id for each in changing}
        while True:
            with suppress(InvalidRequest, Unavailable):
                now = [each.member_id for each in await self._serving(registry, changing[0].model)]
                if len(now) >= num_workers and not old.intersection(now):
                    return now
            await asyncio.sleep(_POLL_S)
