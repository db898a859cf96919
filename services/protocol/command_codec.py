"""Converts the commands of gateways to protobuf messages and back.

Every received message is checked: an invalid one raises InvalidRequest.
"""

from typing import Any

from google.protobuf.message import Message

from quire.v1 import decode_pb2, prefill_pb2, worker_pb2
from services.protocol.codec import check_request_id, ticket_from_wire
from services.protocol.fields import from_wire, to_fields
from services.protocol.messages import (
    Abort,
    Admit,
    Command,
    HandOver,
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
_KINDS = {name: kind for kind, (name, _) in _MESSAGES.items()}


def command_to_wire(command: Command) -> dict[str, Message]:
    """The field of a request to a worker that carries the command."""
    name, message = _MESSAGES[type(command)]
    return {name: message(**to_fields(command))}


def command_from_wire(request: Any) -> Command:
    """The command in a request to a worker."""
    name = request.WhichOneof("command")
    if name not in _KINDS:
        raise InvalidRequest("an unknown command, or a second hello")
    kind, message = _KINDS[name], getattr(request, name)
    if kind in (Admit, Submit):
        if kind is Submit:
            num_top_from_wire(message.prompt_logprobs)
        return from_wire(kind, message, ticket=ticket_from_wire(message.ticket))
    check_request_id(message.request_id)
    return from_wire(kind, message)
