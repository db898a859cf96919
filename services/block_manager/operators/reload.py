"""Lets the workers of a model serve new weights, for operators.

    read      all workers read the weights at the model's path, beside those that they serve; if
              one refuses, all go on with the old ones
    switch    all workers requeue their requests and leave the old pool, and join a new one

All workers switch at once, since a pool needs both roles, and the new pool the memory of the old
one. Requests wait meanwhile, and go on from their tokens.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from blockstore.registry import Member, Registry
from quire.v1.worker_pb2 import Draining, Reload
from quire.worker_names import worker_name
from services.block_manager.operators.drain import tell
from services.runtime.errors import InvalidRequest, Unavailable
from services.runtime.rpc.tls import TlsFiles

_POLL_S = 0.05
_SWITCH_LIMIT_S = 60.0
"""How long workers may take to serve again: they finish their step, and wait for one another."""


class Reloader:
    """Reloads one model at a time. `peer_id`, `rpc_key`, `tls` and `timeout_s` are as in
    `Drainer`; a worker that reads weights has no time limit but the caller's."""

    def __init__(
        self, peer_id: str, rpc_key: bytes, timeout_s: float, tls: TlsFiles | None = None
    ) -> None:
        self._peer_id = peer_id
        self._rpc_key = rpc_key
        self._timeout_s = timeout_s
        self._tls = tls
        self._lock = asyncio.Lock()

    async def reload(self, registry: Registry, model: str) -> Sequence[str]:
        """Serve the weights that are at the path of `model` now; it may be empty if there is only
        one. Returns the ids of the workers that serve them; none if they did so before.

        Raises InvalidRequest if the workers cannot serve the weights, and Unavailable if another
        reload goes on or a worker starts, drains or does not answer. What the workers serve has
        changed only if the error says so.
        """
        if self._lock.locked():
            raise Unavailable("another reload is going on; try again when it has ended")
        async with self._lock:
            old = await self._serving(registry, model)
            answers = await asyncio.gather(*(self._tell(each, Reload()) for each in old))
            if not any(answer.has_new_weights for answer in answers):
                return ()
            here = await self._serving(registry, model)
            if [each.address for each in here] != [each.address for each in old]:
                raise Unavailable("workers have come or gone; nothing has changed; try again")
            return await self._switch(registry, old)

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

    async def _tell(self, worker: Member, message: Reload) -> Draining:
        async with asyncio.timeout(self._timeout_s if message.switches else None):
            command = {"reload": message}
            return await tell(worker, self._peer_id, self._rpc_key, self._tls, command)

    async def _switch(self, registry: Registry, old: Sequence[Member]) -> Sequence[str]:
        """Let the workers switch, and wait until as many serve, and none under its old id."""
        told = (self._tell(each, Reload(switches=True)) for each in old)
        leaving: set[str] = set()
        for worker, answer in zip(
            old, await asyncio.gather(*told, return_exceptions=True), strict=True
        ):
            if isinstance(answer, BaseException):
                name, reason = worker_name(worker.member_id), str(answer) or "it does not answer"
                text = f"{name} may serve the old weights, and others the new ones: reload again"
                raise Unavailable(f"{text} ({reason})") from answer
            if answer.has_new_weights:
                leaving.add(worker.member_id)
        try:
            async with asyncio.timeout(_SWITCH_LIMIT_S):
                while True:
                    with suppress(InvalidRequest, Unavailable):
                        now = await self._serving(registry, old[0].model)
                        worker_ids = [each.member_id for each in now]
                        if len(now) >= len(old) and not leaving.intersection(worker_ids):
                            return worker_ids
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as error:
            text = f"some workers do not serve yet after {_SWITCH_LIMIT_S:g} s; their logs say why"
            raise Unavailable(text) from error
