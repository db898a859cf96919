"""Translates `services.gateway.workers.messages` to and from the protobuf messages of the worker
streams.

A `Dialect` holds everything that differs between the Prefill and the Decode stream.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from grpc import StatusCode, aio

from quire.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, worker_pb2
from services.common.errors import InvalidRequest, Overloaded, QuireError
from services.common.rpc.error_table import FAULTS, PeerFailed
from services.common.rpc.message_batching import each_of
from services.gateway.workers.messages import (
    Abort,
    Admit,
    Began,
    Command,
    DrainNotice,
    Event,
    Failed,
    Generated,
    HandOver,
    LoadReport,
    Malformed,
    Prefilled,
    RequestEvent,
    Requeued,
    RequeueReason,
    Reserve,
    Reserved,
    Resume,
    Submit,
)
from services.protocol.codec import (
    finish_reason_from_wire,
    load_from_wire,
    logprobs_from_wire,
    ticket_from_wire,
    ticket_to_wire,
)

_RETRY_DELAY_S = 1.0

Stream = aio.StreamStreamCall[Any, Any]
Metadata = tuple[tuple[str, str], ...]

_REASONS = {
    worker_pb2.Requeue.REASON_PREEMPTED: RequeueReason.PREEMPTED,
    worker_pb2.Requeue.REASON_DRAINING: RequeueReason.DRAINING,
    worker_pb2.Requeue.REASON_STALE_TICKET: RequeueReason.STALE_TICKET,
    worker_pb2.Requeue.REASON_HANDED_OVER: RequeueReason.HANDED_OVER,
}
_ERRORS = {fault.code: error for error, fault in FAULTS.items() if issubclass(error, QuireError)}


class MalformedMessage(Exception):
    """A message of a worker does not show which request it is about. Any request of the worker may
    have lost an event, so the stream must end. The text says what the worker sent."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """One of the two worker streams.

    `method`: the full name of its RPC; `connect` opens it; `request`: its request type; `parse`
    yields the events of one message, not those of the messages batched in it. An event of an
    unknown kind is skipped.
    """

    method: str
    connect: Callable[[aio.Channel, AsyncIterator[Any], Metadata], Stream]
    request: Callable[..., Any]
    parse: Callable[[Any], Iterator[Event]]

    def events(self, message: Any) -> Iterator[Event]:
        """The events of a message and of those batched in it. An invalid event about a request is
        `Malformed`. MalformedMessage: an event about a request does not name the request."""
        for event in chain.from_iterable(map(self.parse, each_of(message))):
            if isinstance(event, RequestEvent) and not event.request_id:
                raise MalformedMessage("a message about a request, and not which")
            yield event

    def hello(self, hello: worker_pb2.Hello) -> Any:
        return self.request(hello=hello)

    def command(self, command: Command) -> Any:
        match command:
            case Reserve(request_id, attempt, num_sequences):
                reserve = decode_pb2.Reserve(
                    request_id=request_id, attempt=attempt, num_sequences=num_sequences
                )
                return self.request(reserve=reserve)
            case Admit(ticket, suspect):
                admit = decode_pb2.Admit(ticket=ticket_to_wire(ticket), suspect=suspect)
                return self.request(admit=admit)
            case Submit(ticket, prompt_logprobs, suspect):
                submit = prefill_pb2.PrefillSubmit(
                    ticket=ticket_to_wire(ticket), prompt_logprobs=prompt_logprobs, suspect=suspect
                )
                return self.request(submit=submit)
            case Abort(request_id, attempt, index):
                abort = worker_pb2.Abort(request_id=request_id, attempt=attempt, index=index)
                return self.request(abort=abort)
            case HandOver(request_id, attempt):
                hand_over = decode_pb2.HandOver(request_id=request_id, attempt=attempt)
                return self.request(hand_over=hand_over)
            case Resume(ticket):
                return self.request(resume=decode_pb2.Resume(ticket=ticket_to_wire(ticket)))


def _connect_prefill(
    channel: aio.Channel, requests: AsyncIterator[Any], metadata: Metadata
) -> Stream:
    return prefill_pb2_grpc.PrefillStub(channel).Connect(requests, metadata=metadata)


def _connect_decode(
    channel: aio.Channel, requests: AsyncIterator[Any], metadata: Metadata
) -> Stream:
    return decode_pb2_grpc.DecodeStub(channel).Connect(requests, metadata=metadata)


def _prefill_events(message: prefill_pb2.PrefillConnectResponse) -> Iterator[Event]:
    kind = message.WhichOneof("event")
    if kind == "prefilled":
        yield _prefilled(message.prefilled)
    else:
        yield from _common_events(kind, message)


def _decode_events(message: decode_pb2.DecodeConnectResponse) -> Iterator[Event]:
    kind = message.WhichOneof("event")
    if kind == "step":
        yield from map(_generated, message.step.outputs)
    elif kind == "reserved":
        reserved = message.reserved
        yield Reserved(reserved.request_id, reserved.attempt, reserved.granted)
    else:
        yield from _common_events(kind, message)


def _prefilled(message: prefill_pb2.Prefilled) -> Prefilled | Malformed:
    ticket = message.ticket
    try:
        outputs = tuple(map(_output, message.outputs))
        told = tuple(map(logprobs_from_wire, message.prompt_logprobs))
        return Prefilled(ticket_from_wire(ticket, may_have_ended=True), outputs, told)
    except InvalidRequest as error:
        return Malformed(ticket.request_id, ticket.attempt, str(error))


def _generated(output: worker_pb2.SequenceOutput) -> Generated | Malformed:
    try:
        return _output(output)
    except InvalidRequest as error:
        return Malformed(output.request_id, output.attempt, str(error))


def _output(output: worker_pb2.SequenceOutput) -> Generated:
    """The event for one output. InvalidRequest: a field of it is invalid."""
    return Generated(
        output.request_id,
        output.attempt,
        output.index,
        output.position,
        tuple(output.token_ids),
        finish_reason_from_wire(output.finish_reason),
        tuple(map(logprobs_from_wire, output.logprobs)),
        output.score if output.HasField("score") else None,
    )


def _common_events(kind: str | None, message: Any) -> Iterator[Event]:
    if kind == "began":
        yield Began(message.began.request_id, message.began.attempt)
    elif kind == "failed":
        failed = message.failed
        yield Failed(failed.request_id, failed.attempt, failed.code, failed.message)
    elif kind == "requeue":
        yield _requeued(message.requeue)
    elif kind == "load":
        yield LoadReport(*load_from_wire(message.load))
    elif kind == "draining":
        yield DrainNotice()


def _requeued(message: worker_pb2.Requeue) -> Requeued | Malformed:
    ticket = message.ticket
    # A reason that this version does not know requeues the request, too.
    reason = _REASONS.get(message.reason, RequeueReason.STALE_TICKET)
    try:
        has_blocks = any(sequence.block_ids for sequence in ticket.sequences)
        at_rest = ticket_from_wire(ticket) if has_blocks or ticket.HasField("swapped") else None
        searches = at_rest is None and ticket.HasField("beams")
        search = ticket_from_wire(ticket) if searches else None
        return Requeued(ticket.request_id, ticket.attempt, reason, at_rest, search)
    except InvalidRequest as error:
        return Malformed(ticket.request_id, ticket.attempt, str(error))


PREFILL = Dialect(
    "/quire.v1.Prefill/Connect",
    _connect_prefill,
    prefill_pb2.PrefillConnectRequest,
    _prefill_events,
)
DECODE = Dialect(
    "/quire.v1.Decode/Connect", _connect_decode, decode_pb2.DecodeConnectRequest, _decode_events
)


def error_of(code: str, message: str) -> QuireError:
    """The error that a worker reported by its code. An unknown code becomes PeerFailed, with the
    same code and message."""
    error = _ERRORS.get(code)
    if error is None:
        return PeerFailed(message, code or "internal", StatusCode.INTERNAL)
    if issubclass(error, Overloaded):
        return error(message, _RETRY_DELAY_S)
    return error(message)
