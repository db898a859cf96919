"""Converts sampling parameters to protobuf messages and back.

Floats have 32 bits in messages: a value that was in a message once does not change any more. The
gateway has checked the parameters that it sends; here are checks of what a client sends in the same
messages, and of what takes memory at a worker or would end its step.
"""

from collections.abc import MutableMapping, MutableSequence
from dataclasses import fields
from typing import Any

from quire.sampling import Beam
from quire.v1 import sampling_pb2, ticket_pb2
from services.model.structured.structure import MAX_STRUCTURE_BYTES, Structure
from services.protocol.fields import STRUCTURE_KINDS, from_wire, require
from services.protocol.logprobs import MAX_LOGPROBS
from services.protocol.ticket import SamplingParams

_CONVERTED = {"logit_bias", "bad_words"}
_SAME = {f.name for f in fields(SamplingParams)} - _CONVERTED
"""The fields that the dataclass takes from the message as they are."""


def given_fields(message: sampling_pb2.SamplingParams) -> dict[str, Any]:
    """The fields that are set: lists as tuples, maps as dicts, messages as dataclasses. Raises
    InvalidRequest if a message has an unknown value, or the structure is too long."""
    given: dict[str, Any] = {}
    for field, value in message.ListFields():
        if isinstance(value, MutableMapping):
            given[field.name] = dict(value)
        elif field.message_type is None:
            given[field.name] = tuple(value) if isinstance(value, MutableSequence) else value
    if message.HasField("beam"):
        given["beam"] = from_wire(Beam, message.beam)
    if message.HasField("structured_output"):
        given["structure"] = _structure_from_wire(message.structured_output)
    return given


def sampling_from_wire(ticket: ticket_pb2.Ticket) -> SamplingParams:
    message = ticket.sampling
    require(message.max_tokens > 0, "max_tokens is 0")
    require(message.top_k >= 0, f"top_k is {message.top_k}")
    num_top_from_wire(message.logprobs)
    given = {name: value for name, value in given_fields(message).items() if name in _SAME}
    return SamplingParams(
        **given,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        bad_words=tuple(tuple(word.token_ids) for word in ticket.bad_words),
    )


def _structure_from_wire(message: sampling_pb2.StructuredOutput) -> Structure:
    size = len(message.text.encode())
    require(
        size <= MAX_STRUCTURE_BYTES,
        f"structured_output has {size} bytes, at most {MAX_STRUCTURE_BYTES}",
    )
    kind = STRUCTURE_KINDS.member(message.kind, "structured_output: kind")
    return Structure(kind, message.text)


def num_top_from_wire(number: int) -> int:
    """How many of the likeliest tokens to report. Raises InvalidRequest if above MAX_LOGPROBS."""
    require(number <= MAX_LOGPROBS, f"logprobs is {number}")
    return number
