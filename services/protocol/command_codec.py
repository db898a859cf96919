"""Converts the commands of gateways to protobuf messages and back.

Every received message is checked: an invalid one raises InvalidRequest.
"""

from typing import Any

from google.protobuf.message import Message

from quire.v1 import decode_pb2, prefill_pb2, worker_pb2
from services.protocol.codec import check_request_id, ticket_from_wire
from services.protocol.fields import POOLING_MODES, to_fields
from services.protocol.messages import (
    Abort,
    Admit,
    Command,
    HandOver,
    Pooling,
    Reserve,
    Resume,
    Submit,
)
from services.protocol.sampling_codec import num_top_from_wire
from services.runtime.errors import InvalidRequest

_MESSAGES: dict[type[Command], tuple[str, type[Message]]] = {
    Reserve: ("reserve", decode_pb2.Reserve),
    Admit: ("admit", decode_pb2.Admit),
    Submit: ("submit", prefill_pb2.PrefillSubmit),
    Abort: ("abort", worker_pb2.Abort),
    HandOver: ("hand_over", decode_pb2.HandOver),
    Resume: ("resume", decode_pb2.Resume),
}
"""The field of a request that carries each command, and its message."""


def command_to_wire(command: Command) -> dict[str, Message]:
    """The field of a request to a worker that carries the command."""
    name, message = _MESSAGES[type(command)]
    return {name: message(**to_fields(command))}


def command_from_wire(request: Any) -> Command:
    """The command in a request to a worker."""
    match request.WhichOneof("command"):
        case "reserve":
            reserve = request.reserve
            check_request_id(reserve.request_id)
            return Reserve(reserve.request_id, reserve.attempt, reserve.num_sequences)
        case "admit":
            return Admit(ticket_from_wire(request.admit.ticket))
        case "submit":
            submit = request.submit
            asks = submit.HasField("prompt_logprobs")
            num_top = num_top_from_wire(submit.prompt_logprobs) if asks else None
            mode = POOLING_MODES.members.get(submit.pooling.mode)
            pooling = None if mode is None else Pooling(mode, submit.pooling.dimensions)
            return Submit(ticket_from_wire(submit.ticket), num_top, pooling)
        case "abort":
            abort = request.abort
            index = abort.index if abort.HasField("index") else None
            return Abort(abort.request_id, abort.attempt, index)
        case "hand_over":
            return HandOver(request.hand_over.request_id, request.hand_over.attempt)
        case "resume":
            resume = request.resume
            check_request_id(resume.request_id)
            return Resume(resume.request_id, resume.attempt, resume.digest)
    raise InvalidRequest("an unknown command, or a second hello")
