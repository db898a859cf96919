"""Converts the events of workers to protobuf messages and back."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from google.protobuf.message import Message

from quire.v1 import decode_pb2, logprobs_pb2, prefill_pb2, ticket_pb2, worker_pb2
from services.protocol.codec import load_from_wire, state_to_wire
from services.protocol.fields import FINISH_REASONS, REQUEUE_REASONS, from_wire, to_fields
from services.protocol.logprobs import LogprobColumns, Logprobs
from services.protocol.messages import (
    AwaitsBlocks,
    Began,
    DrainNotice,
    Event,
    Failed,
    Generated,
    Prefilled,
    Requeued,
    Reserved,
    Step,
    WorkerEvent,
)
from services.protocol.ticket import TicketState
from services.protocol.version import PROTOCOL_VERSION

Fields = dict[str, Message]
"""One field of a response message, by its name."""

_MESSAGES: dict[type[WorkerEvent], tuple[str, type[Message]]] = {
    AwaitsBlocks: ("awaits_blocks", prefill_pb2.AwaitsBlocks),
    Began: ("began", worker_pb2.Began),
    Reserved: ("reserved", decode_pb2.Reserved),
    Failed: ("failed", worker_pb2.RequestFailed),
    DrainNotice: ("draining", worker_pb2.Draining),
}
"""The field of a response that carries each event, and its message."""
_KINDS: dict[str, Any] = {name: kind for kind, (name, _) in _MESSAGES.items()}
_ROWS_UNTIL = 9
"""The last version in which the logprobs of a prompt have a message for each token."""


def event_to_wire(event: WorkerEvent, version: int = PROTOCOL_VERSION) -> Fields:
    """The field of a worker's response that carries the event, for a peer of this version."""
    if isinstance(event, Prefilled):
        prefilled = prefill_pb2.Prefilled(
            ticket=state_to_wire(event.ticket),
            outputs=map(_output_to_wire, event.outputs),
            embedding=event.embedding,
        )
        if event.prompt_logprobs is not None:
            _add_prompt_logprobs(prefilled, event.prompt_logprobs, version)
        return {"prefilled": prefilled}
    if isinstance(event, Requeued):
        state = ticket_pb2.TicketState(request_id=event.request_id, attempt=event.attempt)
        if event.ticket is not None:
            state = state_to_wire(event.ticket)
        reason = REQUEUE_REASONS.numbers[event.reason]
        return {"requeue": worker_pb2.Requeue(ticket=state, reason=reason)}
    if isinstance(event, Step):
        return {"step": decode_pb2.StepOutput(outputs=map(_output_to_wire, event.outputs))}
    name, message = _MESSAGES[type(event)]
    return {name: message(**to_fields(event))}


def events_from_wire(message: Any) -> Iterator[Event]:
    """The events of one response of a worker. An event of an unknown kind is skipped."""
    match message.WhichOneof("event"):
        case "step":
            yield from map(_output_from_wire, message.step.outputs)
        case "requeue":
            state = from_wire(TicketState, message.requeue.ticket)
            reason = REQUEUE_REASONS.members[message.requeue.reason]
            yield Requeued(*state.key, reason, state if state.sequences else None)
        case "load":
            yield load_from_wire(message.load)
        case "prefilled":
            prompt_logprobs = _prompt_logprobs(message.prefilled)
            yield from_wire(Prefilled, message.prefilled, prompt_logprobs=prompt_logprobs)
        case str(name) if name in _KINDS:
            yield from_wire(_KINDS[name], getattr(message, name))


def _add_prompt_logprobs(message: Any, found: LogprobColumns, version: int) -> None:
    if version <= _ROWS_UNTIL:
        rows = (logprobs_pb2.Logprobs(**to_fields(row)) for row in found.rows())
        message.prompt_logprobs.extend(rows)
        return
    columns = message.prompt_logprob_columns
    for name in LogprobColumns.__dataclass_fields__:
        getattr(columns, name).extend(getattr(found, name).ravel().tolist())


def _prompt_logprobs(message: Any) -> LogprobColumns | None:
    if not message.HasField("prompt_logprob_columns"):  # a worker of the version before
        rows = [from_wire(Logprobs, row) for row in message.prompt_logprobs]
        return LogprobColumns.of(rows) if rows else None
    columns = message.prompt_logprob_columns
    shape = len(columns.logprobs), len(columns.top_token_ids) // max(1, len(columns.logprobs))
    return LogprobColumns(
        np.array(columns.logprobs, np.float32),
        np.array(columns.ranks, np.uint32),
        np.array(columns.top_token_ids, np.uint32).reshape(shape),
        np.array(columns.top_logprobs, np.float32).reshape(shape),
    )


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
        num_drafts=output.num_drafts,
        num_accepted=output.num_accepted,
    )


def _output_from_wire(output: worker_pb2.SequenceOutput) -> Generated:
    """As `from_wire` does, in less time: a gateway reads one for each token."""
    finish = output.finish_reason
    return Generated(
        output.request_id,
        output.attempt,
        output.index,
        output.position,
        tuple(output.token_ids),
        FINISH_REASONS.members[finish] if finish else None,
        tuple(from_wire(Logprobs, each) for each in output.logprobs),
        output.score if output.HasField("score") else None,
        output.num_drafts,
        output.num_accepted,
    )
