"""The gRPC service quire.v1.Mover."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from quire.v1 import mover_pb2 as pb
from quire.v1 import mover_pb2_grpc
from services.mover.mover import Mover
from services.pool.header import PoolHeader
from services.protocol.codec import state_to_wire, ticket_from_wire
from services.protocol.version import LIBRARIES
from services.runtime.errors import InvalidRequest, VersionMismatch

_COPYING_S = 5.0
"""How often a pull that takes long says that it goes on. Each of its parts has a time limit."""

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Mover"].full_name


class MoverService(mover_pb2_grpc.MoverServicer):
    """Answers other movers and gateways; `memory` is what `Transport.share` has returned."""

    def __init__(self, mover: Mover, header: PoolHeader, transport: str, memory: bytes) -> None:
        self._mover = mover
        self._description = pb.DescribeResponse(
            header=header.dump(), transport=transport, memory=memory
        )

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:
        theirs = request.protocol_version, request.function_library
        if theirs not in LIBRARIES.items():
            raise VersionMismatch(
                f"the other mover speaks protocol {theirs[0]} with function library {theirs[1]!r}, "
                f"this one {LIBRARIES}"
            )
        return self._description

    async def Pull(self, request: pb.PullRequest, context: Any) -> AsyncIterator[pb.PullResponse]:
        ticket = ticket_from_wire(request.ticket)
        with_blocks = [bool(sequence.block_ids) for sequence in ticket.sequences]
        if len(set(with_blocks)) > 1:
            raise InvalidRequest("some sequences of the ticket have blocks, others have none")
        async with self._mover.pulling(ticket, request.source_pool_id) as (answer, pull):
            while not (await asyncio.wait({answer}, timeout=_COPYING_S))[0]:
                yield pb.PullResponse(copying=True)
            moved = answer.result()
            yield pb.PullResponse(
                ticket=None if moved is None else state_to_wire(moved.state),
                num_blocks=pull.num_blocks,
            )
            if moved is not None:
                await asyncio.Event().wait()  # until the gateway ends the call
