"""Converts the events of workers to protobuf messages and back.

Every received message is checked; an invalid one about a request becomes `Malformed`.
"""

import math
from collections.abc import Iterator
from typing import Any

from google.protobuf.message import Message

from quire.v1 import decode_pb2, logprobs_pb2, prefill_pb2, worker_pb2
from services.protocol.codec import (
    finish_reason_from_wire,
    load_from_wire,
    logprobs_from_wire,
    ticket_from_wire,
    ticket_to_wire,
)
from services.protocol.fields import FINISH_REASONS, REQUEUE_REASONS, require, to_fields
from services.protocol.messages import (
    Began,
    DrainNotice,
    Event,
    Failed,
    Generated,
    Malformed,
    Prefilled,
    Requeued,
    RequeueReason,
    Reserved,
    Step,
    WorkerEvent,
)
from services.protocol.ticket import MAX_DIMENSIONS
from services.runtime.errors import InvalidRequest

Fields = dict[str, Message]
"""One field of a response message, by its name."""

_MESSAGES: dict[type[WorkerEvent], tuple[str, type[Message]]] = {
    Began: ("began", worker_pb2.Began),
    Prefilled: ("prefilled", prefill_pb2.Prefilled),
    Reserved: ("reserved", decode_pb2.Reserved),
    Failed: ("failed", worker_pb2.RequestFailed),
    DrainNotice: ("draining", worker_pb2.Draining),
}
"""The field of a response that carries each event, and its message."""


def event_to_wire(event: WorkerEvent) -> Fields:
    """The field of a worker's response that carries the event."""
    if isinstance(event, Requeued):
        returned = event.ticket or event.progress
        assert returned is not None
        reason = REQUEUE_REASONS.numbers[event.reason]
        return {"requeue": worker_pb2.Requeue(ticket=ticket_to_wire(returned), reason=reason)}
    if isinstance(event, Step):
        return {"step": decode_pb2.StepOutput(outputs=map(_output_to_wire, event.outputs))}
    name, message = _MESSAGES[type(event)]
    return {name: message(**to_fields(event))}


def events_from_wire(message: Any) -> Iterator[Event]:
    """The events of one response of a worker. An event of an unknown kind is skipped."""
    match message.WhichOneof("event"):
        case "step":
            yield from map(_generated, message.step.outputs)
        case "prefilled":
            yield _prefilled(message.prefilled)
        case "reserved":
            reserved = message.reserved
            yield Reserved(reserved.request_id, reserved.attempt, reserved.granted)
        case "began":
            yield Began(message.began.request_id, message.began.attempt)
        case "failed":
            failed = message.failed
            yield Failed(failed.request_id, failed.attempt, failed.code, failed.message)
        case "requeue":
            yield _requeued(message.requeue)
        case "load":
            yield load_from_wire(message.load)
        case "draining":
            yield DrainNotice(message.draining.num_running)


def _prefilled(message: prefill_pb2.Prefilled) -> Prefilled | Malformed:
    ticket = message.ticket
    try:
        outputs = tuple(map(_output_from_wire, message.outputs))
        prompt_logprobs = tuple(map(logprobs_from_wire, message.prompt_logprobs))
        return Prefilled(ticket_from_wire(ticket, may_have_ended=True), outputs, prompt_logprobs)
    except InvalidRequest as error:
        return Malformed(ticket.request_id, ticket.attempt, str(error))


def _generated(output: worker_pb2.SequenceOutput) -> Generated | Malformed:
    try:
        return _output_from_wire(output)
    except InvalidRequest as error:
        return Malformed(output.request_id, output.attempt, str(error))


def _requeued(message: worker_pb2.Requeue) -> Requeued | Malformed:
    ticket = message.ticket
    # A reason that this version does not know requeues the request, too.
    reason = REQUEUE_REASONS.members.get(message.reason, RequeueReason.STALE_TICKET)
    try:
        has_blocks = any(sequence.block_ids for sequence in ticket.sequences)
        is_detached = has_blocks or ticket.HasField("swapped")
        detached = ticket_from_wire(ticket) if is_detached else None
        is_search = detached is None and ticket.HasField("beams")
        progress = ticket_from_wire(ticket) if is_search else None
        return Requeued(ticket.request_id, ticket.attempt, reason, detached, progress)
    except InvalidRequest as error:
        return Malformed(ticket.request_id, ticket.attempt, str(error))


def _output_to_wire(output: Generated) -> worker_pb2.SequenceOutput:
    """As `to_fields` does, in a quarter of the time: a worker sends one for each token."""
    return worker_pb2.SequenceOutput(
        request_id=output.request_id,
        attempt=output.attempt,
        index=output.index,
        position=output.position,
        token_ids=output.token_ids,
        finish_reason=output.finish_reason and FINISH_REASONS.numbers[output.finish_reason],
        logprobs=[logprobs_pb2.Logprobs(**to_fields(each)) for each in output.logprobs],
        score=output.score,
        embedding=output.embedding,
        num_drafts=output.num_drafts,
        num_accepted=output.num_accepted,
    )


def _embedding(output: worker_pb2.SequenceOutput) -> tuple[float, ...]:
    require(len(output.embedding) <= MAX_DIMENSIONS, f"{len(output.embedding)} dimensions")
    require(all(map(math.isfinite, output.embedding)), "an embedding is not finite")
    return tuple(output.embedding)


def _output_from_wire(output: worker_pb2.SequenceOutput) -> Generated:
    most = min(output.num_drafts, len(output.token_ids))
    require(output.num_accepted <= most, f"{output.num_accepted} of {most} drafts accepted")
    return Generated(
        output.request_id,
        output.attempt,
        output.index,
        output.position,
        tuple(output.token_ids),
        finish_reason_from_wire(output.finish_reason),
        tuple(map(logprobs_from_wire, output.logprobs)),
        output.score if output.HasField("score") else None,
        _embedding(output),
        output.num_drafts,
        output.num_accepted,
    )
