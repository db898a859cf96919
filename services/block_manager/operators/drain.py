"""Drains workers for operators, over a Connect stream like a gateway's: a drained worker leaves, or
takes the other role."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from blockstore.errors import UnknownPool
from blockstore.registry import Member
from quire.v1.worker_pb2 import Drain, Draining, Reload
from quire.worker_names import worker_name
from services.block_manager.rounds import Connection
from services.protocol.worker_stream import StreamEnded, read, stream_type
from services.runtime.errors import InvalidRequest, LastWorker, Unavailable, UnknownWorker
from services.runtime.rpc.message_batching import unpack_batch
from services.runtime.rpc.proof import Proof
from services.runtime.rpc.tls import TlsFiles
from services.runtime.rpc.transport import open_channel, translate_errors

_REGISTRY_LAG_S = 5.0
"""How long the registry may still list a worker as serving after it was told to drain."""


class Drainer:
    """Drains workers for operators: one at a time, and never the last serving worker of its role on
    a pool, unless the operator forces it. `tell` sends a command to a worker, as below. A worker
    has `timeout_s` to answer."""

    def __init__(self, tell: Callable[..., Awaitable[Draining]], timeout_s: float) -> None:
        self._tell = tell
        self._timeout_s = timeout_s
        self._lock = asyncio.Lock()
        self._recent: dict[tuple[str, str], float] = {}
        """When the lag ends, by the id and the role of a drained worker."""

    async def drain(
        self, connection: Connection, worker_id: str, *, force: bool, next_role: str = ""
    ) -> int:
        """Tell a worker to drain, and then to leave or to take `next_role`. Returns how many
        requests it still runs.

        Raises LastWorker, UnknownWorker if the registry lists no prefill or decode worker with this
        id, InvalidRequest if the worker cannot take the role, Unavailable if the worker is starting
        or does not answer, and TimeoutError if it did not answer in time; it may drain
        nevertheless.
        """
        async with self._lock:  # the second of two drains must see the first
            members = await connection.registry.members()
            worker = _worker(members, worker_id)
            if not force:
                await self._require_another(connection, members, worker, next_role)
            # Noted even if no answer comes: the worker may have received the message.
            told = worker_id, worker.role
            before = self._recent.get(told, 0.0)
            self._recent[told] = asyncio.get_running_loop().time() + _REGISTRY_LAG_S
            try:
                async with asyncio.timeout(self._timeout_s):
                    answer = await self._tell(worker, drain=Drain(next_role=next_role))
                    return int(answer.num_running)
            except InvalidRequest:
                self._recent[told] = before
                raise

    async def _require_another(
        self, connection: Connection, members: tuple[Member, ...], worker: Member, next_role: str
    ) -> None:
        """Raise LastWorker if `worker` is the last one of its role that serves the pool. A worker
        that drains already may be drained again."""
        now = asyncio.get_running_loop().time()
        self._recent = {told: until for told, until in self._recent.items() if until > now}
        fenced: tuple[str, ...] = ()
        with suppress(UnknownPool):
            fenced = (await connection.store.stats(worker.pool_id)).fenced_worker_ids
        peers = [m for m in members if (m.role, m.pool_id) == (worker.role, worker.pool_id)]
        serving = {m.member_id for m in peers if m.state == "serving"} - set(fenced)
        others = {each for each in serving if (each, worker.role) not in self._recent}
        if worker.member_id in serving and others <= {worker.member_id}:
            or_else = ", or drain it with --force, and requests wait until there is another one"
            raise LastWorker(
                f"{worker_name(worker.member_id)} is the last {worker.role} worker that serves "
                f"{worker.model} on pool {worker.pool_id} (of {len(peers)} there, 1 serves): start "
                # A change of role cannot be forced.
                f"another one first{'' if next_role else or_else}"
            )


def _worker(members: tuple[Member, ...], worker_id: str) -> Member:
    worker = next((member for member in members if member.member_id == worker_id), None)
    if worker is None or worker.role not in ("prefill", "decode"):
        raise UnknownWorker(f"no worker {worker_id!r}")
    if worker.state == "starting":
        raise Unavailable(f"{worker_name(worker_id)} has not started yet; try again")
    return worker


async def tell(
    worker: Member,
    peer_id: str,
    rpc_key: bytes,
    tls: TlsFiles | None = None,
    **command: Drain | Reload,
) -> Draining:
    """Send an operator's command, under its field's name, and return the worker's answer. Raises
    Unauthenticated if another process is at its address, VersionMismatch, InvalidRequest if it
    refuses, or Unavailable if it does not answer."""
    kind = stream_type(worker.role)
    proof = Proof(rpc_key, kind.method, worker.member_id)
    async with open_channel(worker.address, tls) as channel:
        with translate_errors():
            stream = kind.connect(channel, None, proof.metadata)
            try:
                with suppress(asyncio.InvalidStateError):  # it refused already: `read` says why
                    await stream.write(kind.hello(peer_id, worker.protocol_version))
                while True:
                    for message in unpack_batch(await read(stream)):
                        match message.WhichOneof("event"):
                            case "welcome":
                                proof.check(await stream.initial_metadata())
                                # Not before the welcome: if the worker refuses the hello, a second
                                # message would hide the worker's reason.
                                await stream.write(kind.request(**command))
                            case "draining":
                                answer: Draining = message.draining
                                return answer
            except StreamEnded as error:
                text = f"worker {worker.member_id} gave no answer: {error}"
                raise Unavailable(text) from error
            finally:
                stream.cancel()
