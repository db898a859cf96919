"""Relays operators' calls, unchanged, to the service that answers them: a block manager in the
registry, or the supervisor of this run. Each host has a block manager; one that does not answer is
not asked while another one does.

Operations have their own listener; the public one serves them to operators' API keys only.
Each call leaves a line in the log, the audit log of operations: `operation_performed`,
with the operator, the method, the target and the outcome.

The relay checks that a request parses as its message, then forwards the received bytes. It takes
the operations from the service's descriptor, so new operations and new fields need no change here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass
from grpc import aio

from quire.v1 import block_manager_pb2, supervisor_pb2
from services.gateway.access.audit import audited
from services.runtime.errors import NoSupervisor, QuireError, Unavailable
from services.runtime.logging import get_logger
from services.runtime.rpc.interceptor import CODE_TRAILER, REQUEST_ID_METADATA
from services.runtime.rpc.kept_channel import KeptChannel
from services.runtime.rpc.proof import Proof
from services.runtime.rpc.tls import TlsFiles
from services.runtime.rpc.transport import from_rpc_error

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Relayed:
    """A service whose operations are relayed."""

    descriptor: Any
    absent: Callable[[], QuireError]
    """The error to raise if no process serves it."""
    silent: Callable[[], QuireError]
    """The error to raise if that process does not answer."""

    @property
    def name(self) -> str:
        return str(self.descriptor.full_name)


BLOCK_MANAGER = Relayed(
    block_manager_pb2.DESCRIPTOR.services_by_name["BlockManager"],
    absent=lambda: Unavailable("the block manager is not there; try again"),
    silent=lambda: Unavailable("the block manager does not answer; try again"),
)
SUPERVISOR = Relayed(
    supervisor_pb2.DESCRIPTOR.services_by_name["Supervisor"],
    absent=lambda: NoSupervisor(
        "this gateway was not started by `quire serve`: scale with what started it, "
        "e.g. docker compose up --scale decode=3"
    ),
    silent=lambda: Unavailable("the supervisor does not answer; try again"),
)


@dataclass(frozen=True, slots=True)
class Target:
    """The process that serves a relayed service now."""

    address: str
    member_id: str = ""
    """The member that a call's proof is made for. Empty: the service listens on a socket that only
    its own user can open, and needs no proof."""


class Relay:
    """Relays one service. `find` returns the processes that serve it now; any one will do."""

    def __init__(
        self,
        relayed: Relayed,
        find: Callable[[], Sequence[Target]],
        rpc_key: bytes = b"",
        tls: TlsFiles | None = None,
    ) -> None:
        self.name = relayed.name
        self._relayed = relayed
        self._rpc_key = rpc_key
        self._find = find
        self._tls = tls
        self._kept: KeptChannel | None = None
        self._unable: set[Target] = set()

    def handlers(self) -> grpc.GenericRpcHandler:
        """One handler for each operation; requests and responses are bytes."""
        return grpc.method_handlers_generic_handler(
            self._relayed.name,
            {
                method.name: grpc.unary_unary_rpc_method_handler(self._operation(method))
                for method in self._relayed.descriptor.methods
            },
        )

    async def close(self) -> None:
        if self._kept is not None:
            await self._kept.close()

    def _operation(self, method: Any) -> Callable[[bytes, Any], Any]:
        message = GetMessageClass(method.input_type)

        async def call(request: bytes, context: aio.ServicerContext[bytes, bytes]) -> bytes:
            asked = message.FromString(request)  # DecodeError: the client sent no such message
            with audited(method.name, asked):
                return await self.send(
                    method.name, request, context.time_remaining(), _metadata(context)
                )

        return call

    async def send(
        self,
        method: str,
        request: bytes,
        timeout_s: float | None,
        metadata: tuple[tuple[str, str | bytes], ...] = (),
    ) -> bytes:
        """Call an operation and return its answer. Raises the service's error, `absent()` or
        `silent()`."""
        target = self._chosen()
        name = f"/{self._relayed.name}/{method}"
        relayed: Any = self._channel(target.address).unary_unary(name)
        proof = Proof(self._rpc_key, name, target.member_id) if target.member_id else None
        metadata += proof.metadata if proof else ()
        running = relayed(request, timeout=timeout_s, metadata=metadata)
        try:
            answer: bytes = await running
        except aio.AioRpcError as error:
            raise self._translate_error(target, error) from error
        if proof is not None:
            proof.check(await running.initial_metadata())
        return answer

    def _chosen(self) -> Target:
        """The first process that was able to answer, if there is one."""
        found = self._find()
        self._unable.intersection_update(found)
        able = [target for target in found if target not in self._unable]
        if not found:
            raise self._relayed.absent()
        if not able:
            self._unable.clear()
        return (able or found)[0]

    def _channel(self, address: str) -> aio.Channel:
        if self._kept is None or self._kept.address != address:
            if self._kept is not None:
                self._kept.leave()
            self._kept = KeptChannel(address, self._tls)
        return self._kept.get()

    def _translate_error(self, target: Target, error: aio.AioRpcError) -> QuireError:
        """The service's own error if it sent one; `silent()` if gRPC itself reports UNAVAILABLE.
        In both cases the next call goes to another process: one that cannot reach the block store
        may be on a host that is cut off."""
        said_by_it = any(key == CODE_TRAILER for key, _ in error.trailing_metadata() or ())
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            self._unable.add(target)
            return from_rpc_error(error) if said_by_it else self._relayed.silent()
        return from_rpc_error(error)


def _metadata(context: aio.ServicerContext[Any, Any]) -> tuple[tuple[str, str | bytes], ...]:
    received = context.invocation_metadata() or ()
    return tuple((key, value) for key, value in received if key == REQUEST_ID_METADATA)
