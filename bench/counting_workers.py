"""Fake workers that only count: each sequence gets one token a step.

A process of `run_workers` plays a prefill and a decode worker to a gateway that is measured.
"""

import asyncio
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from typing import Any

from blockstore.records import PoolSpec
from blockstore.registry import Member, Role
from blockstore.store import FUNCTION_LIBRARY
from quire.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    sampling_pb2,
    ticket_pb2,
    worker_pb2,
)
from services.protocol.version import PROTOCOL_VERSION
from services.runtime.rpc.message_batching import unpack_batch
from services.runtime.rpc.proof import Guard
from services.runtime.rpc.transport import RpcServer
from services.runtime.secret import Secret

SPEC = PoolSpec("pool", "toy", "fingerprint", num_blocks=1 << 20, block_size=16, block_bytes=1)
SECRET = Secret(b"the secret of a deployment that is measured")
_TOKEN = 97
_GOES_ON = sampling_pb2.FINISH_REASON_UNSPECIFIED
_ENDS = sampling_pb2.FINISH_REASON_LENGTH


def member(role: Role, name: str, spec: PoolSpec, model_dir: str, port: int, slots: int) -> Member:
    """The entry of a fake worker in the registry."""
    return Member(
        member_id=name,
        role=role,
        address=f"127.0.0.1:{port}",
        state="serving",
        started_unix_ms=1,
        protocol_version=PROTOCOL_VERSION,
        pool_id=spec.pool_id,
        model=spec.model,
        model_dir=model_dir,
        max_model_len=1 << 20,
        max_num_seqs=slots,
    )


def _welcome(worker_id: str, num_slots: int) -> worker_pb2.Welcome:
    return worker_pb2.Welcome(
        worker_id=worker_id,
        protocol_version=PROTOCOL_VERSION,
        function_library=FUNCTION_LIBRARY,
        pool_id=SPEC.pool_id,
        load=worker_pb2.WorkerLoad(num_free_slots=num_slots),
    )


async def _each(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for together in requests:
        for request in unpack_batch(together):
            yield request


class CountingPrefill(prefill_pb2_grpc.PrefillServicer):
    async def Connect(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        async for request in _each(request_iterator):
            kind = request.WhichOneof("command")
            if kind == "hello":
                yield prefill_pb2.PrefillConnectResponse(welcome=_welcome("prefill-1", 0))
            elif kind == "submit":
                ticket = request.submit.ticket
                ticket.sequences[0].token_ids.append(_TOKEN)
                ticket.sequences[0].block_ids.append(0)
                state = ticket_pb2.TicketState.FromString(ticket.SerializeToString())
                output = worker_pb2.SequenceOutput(
                    request_id=ticket.request_id,
                    attempt=ticket.attempt,
                    position=len(ticket.prompt_token_ids),
                    token_ids=(_TOKEN,),
                )
                yield prefill_pb2.PrefillConnectResponse(
                    prefilled=prefill_pb2.Prefilled(ticket=state, outputs=[output])
                )


class CountingDecode(decode_pb2_grpc.DecodeServicer):
    """All sequences take a step when the stream has taken the last one; they start together."""

    def __init__(self, num_slots: int, step_s: float) -> None:
        self._num_slots = num_slots
        self._step_s = step_s
        self._running: dict[tuple[str, int], range] = {}
        """The positions of each sequence that have no token yet."""
        self._admitted = asyncio.Event()

    async def Connect(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        reading = asyncio.create_task(self._read(request_iterator, context))
        try:
            while True:
                await self._admitted.wait()
                self._admitted.clear()
                while self._running:
                    yield self._step()
                    await asyncio.sleep(self._step_s)
        finally:
            reading.cancel()

    async def _read(self, request_iterator: Any, context: Any) -> None:
        async for request in _each(request_iterator):
            kind = request.WhichOneof("command")
            if kind == "hello":
                welcome = _welcome("decode-1", self._num_slots)
                await context.write(decode_pb2.DecodeConnectResponse(welcome=welcome))
            elif kind == "reserve":
                reserved = decode_pb2.Reserved(
                    request_id=request.reserve.request_id,
                    attempt=request.reserve.attempt,
                    granted=True,
                )
                await context.write(decode_pb2.DecodeConnectResponse(reserved=reserved))
            elif kind == "admit":
                ticket = request.admit.ticket
                begin = len(ticket.prompt_token_ids)
                positions = range(begin + 1, begin + ticket.sampling.max_tokens)
                self._running[ticket.request_id, ticket.attempt] = positions
                if len(self._running) == self._num_slots:
                    self._admitted.set()

    def _step(self) -> decode_pb2.DecodeConnectResponse:
        outputs = [
            worker_pb2.SequenceOutput(
                request_id=request_id,
                attempt=attempt,
                position=positions[0],
                token_ids=(_TOKEN,),
                finish_reason=_GOES_ON if len(positions) > 1 else _ENDS,
            )
            for (request_id, attempt), positions in self._running.items()
        ]
        left = ((key, positions[1:]) for key, positions in self._running.items())
        self._running = {key: positions for key, positions in left if positions}
        return decode_pb2.DecodeConnectResponse(step=decode_pb2.StepOutput(outputs=outputs))


async def run_workers(pipe: Connection, num_slots: int, step_s: float) -> None:
    prefill, decode = (
        RpcServer(guard=Guard(SECRET.rpc_key, f"{role}-1")) for role in ("prefill", "decode")
    )
    prefill_pb2_grpc.add_PrefillServicer_to_server(CountingPrefill(), prefill.aio)
    decode_pb2_grpc.add_DecodeServicer_to_server(CountingDecode(num_slots, step_s), decode.aio)
    pipe.send([await server.start("127.0.0.1", 0) for server in (prefill, decode)])
    await asyncio.to_thread(pipe.recv)
