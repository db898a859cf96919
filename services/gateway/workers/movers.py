"""The movers in the registry: which pool can be copied to which, how fast, and the calls that do
it."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from grpc import aio

from blockstore.registry import Member
from quire.v1 import mover_pb2, mover_pb2_grpc
from services.gateway.workers.lease import DetachedTicket
from services.gateway.workers.worker import Worker
from services.protocol.codec import ticket_to_wire
from services.protocol.fields import from_wire
from services.protocol.ticket import Ticket, TicketState
from services.runtime.errors import QuireError, Unavailable
from services.runtime.logging import get_logger
from services.runtime.rpc.kept_channel import KeptChannel
from services.runtime.rpc.proof import Proof
from services.runtime.rpc.tls import TlsFiles
from services.runtime.rpc.transport import from_rpc_error

log = get_logger(__name__)

_METHOD = "/quire.v1.Mover/Pull"
_SILENCE_S = 30.0
"""How long a mover may say nothing; a copy that takes longer is announced more often."""

_AVOID_S = 5.0
"""How long a pair of pools is not used after a pull between them has failed."""

_BANDWIDTH = "bandwidth:"
"""Prefix of a mover's registry fields: see `services.mover.mover`."""


class PulledTicket(DetachedTicket):
    """A ticket whose KV a mover has copied to its pool. The mover keeps it as long as the call
    lasts; a worker that claims it takes it over."""

    def __init__(self, mover: Worker, ticket: Ticket, call: aio.UnaryStreamCall[Any, Any]) -> None:
        super().__init__(mover, ticket)
        self._call = call

    def _on_release(self) -> None:
        self._call.cancel()


class Movers:
    """Follows the registry by `follow`. `rpc_key` and `tls` are the deployment's."""

    def __init__(self, rpc_key: bytes, tls: TlsFiles | None = None) -> None:
        self._rpc_key = rpc_key
        self._tls = tls
        self._movers: dict[str, tuple[Worker, KeptChannel]] = {}  # by the pool that they fill
        self._avoided: dict[tuple[str, str], float] = {}
        self._clock = asyncio.get_running_loop().time

    def follow(self, members: Iterable[Member]) -> bool:
        """Take over the movers of the registry's entries. Returns whether other pools than before
        can be copied, or to others."""
        before = self._pairs()
        # A mover that was killed stays registered for seconds, beside the one in its place.
        by_age = sorted(members, key=lambda member: member.started_unix_ms)
        serving = {m.pool_id: m for m in by_age if (m.role, m.state) == ("mover", "serving")}
        for pool_id, (worker, channel) in tuple(self._movers.items()):
            member = serving.get(pool_id)
            if member is not None and member.member_id == worker.id:
                worker.member = member
            else:  # it may be alive and cut off from Redis: its calls go on
                del self._movers[pool_id]
                channel.leave()
        for pool_id in serving.keys() - self._movers.keys():
            worker = Worker(serving[pool_id], lambda command: None)
            self._movers[pool_id] = worker, KeptChannel(worker.member.address, self._tls)
        return self._pairs() != before

    def _pairs(self) -> set[tuple[str, str]]:
        movers = self._movers.items()
        return {(name, target) for target, (mover, _) in movers for name in mover.member.engine}

    def bandwidth(self, source_pool_id: str, target_pool_id: str) -> float:
        """The bytes a second from one pool to another; 0: the one cannot be copied to the other
        now."""
        if target_pool_id not in self._movers:
            return 0.0
        if self._avoided.get((source_pool_id, target_pool_id), 0.0) > self._clock():
            return 0.0
        worker, _ = self._movers[target_pool_id]
        text = worker.member.engine.get(_BANDWIDTH + source_pool_id, "")
        return float(text) if text.isdecimal() else 0.0

    async def pull(
        self, ticket: Ticket, source_pool_id: str, target_pool_id: str
    ) -> PulledTicket | None:
        """Copy a ticket's KV to another pool. If the ticket has no blocks, copy its prompt's blocks
        to the prefix cache there, and return None. Raises QuireError if nothing was copied."""
        if target_pool_id not in self._movers:
            raise Unavailable(f"pool {target_pool_id} has no mover now")
        mover, channel = self._movers[target_pool_id]
        proof = Proof(self._rpc_key, _METHOD, mover.id)
        request = mover_pb2.PullRequest(
            ticket=ticket_to_wire(ticket), source_pool_id=source_pool_id
        )
        call = mover_pb2_grpc.MoverStub(channel.get()).Pull(request, metadata=proof.metadata)
        try:
            moved = await self._answer(call, proof)
        except QuireError:
            self._avoided[source_pool_id, target_pool_id] = self._clock() + _AVOID_S
            raise
        if moved is None:
            return None
        ticket = replace(ticket.with_state(moved), pool_id=target_pool_id)
        return PulledTicket(mover, ticket, call)

    async def _answer(self, call: Any, proof: Proof) -> TicketState | None:
        is_kept = False
        try:
            message = await self._message(call, proof)
            while message.copying:
                message = await self._message(call, proof)
            is_kept = message.HasField("ticket")
            return from_wire(TicketState, message.ticket) if is_kept else None
        except aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        except asyncio.CancelledError as error:
            # gRPC raises it, too, if the call was ended from elsewhere, with its channel.
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise Unavailable("the call of the mover was ended") from error
        except TimeoutError as error:
            raise Unavailable(f"the mover said nothing for {_SILENCE_S:g} s") from error
        finally:
            if not is_kept:
                call.cancel()

    async def _message(self, call: Any, proof: Proof) -> mover_pb2.PullResponse:
        async with asyncio.timeout(_SILENCE_S):
            message = await call.read()
            if message is aio.EOF:
                raise Unavailable(f"the mover ended the call: {await call.details()}")
            proof.check(await call.initial_metadata())
        return message  # type: ignore[no-any-return]

    async def close(self) -> None:
        """End all calls."""
        for _, channel in self._movers.values():
            await channel.close()
        self._movers.clear()
