"""Converts sampling parameters to protobuf messages and back.

Floats have 32 bits in messages: a value that was in a message once does not change any more. The
gateway has checked the parameters that it sends; here are checks of what a client sends in the same
messages, and of what takes memory at a worker.
"""

from dataclasses import fields

from quire.v1 import sampling_pb2, ticket_pb2
from services.model.structured.structure import MAX_STRUCTURE_BYTES, Structure
from services.protocol.fields import EARLY_STOPPING, STRUCTURE_KINDS, require, values
from services.protocol.logprobs import MAX_LOGPROBS
from services.protocol.ticket import MAX_BEAM_WIDTH, BeamParams, EarlyStopping, SamplingParams

_CONVERTED = {
    *("logprobs", "stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words"),
    *("structure", "beam"),
}
_PLAIN_OF_SAMPLING = [f.name for f in fields(SamplingParams) if f.name not in _CONVERTED]
"""Fields that are equal in the dataclass and in the message."""


def sampling_from_wire(message: ticket_pb2.TicketSampling) -> SamplingParams:
    require(message.max_tokens > 0, "max_tokens is 0")
    logprobs = num_top_from_wire(message.logprobs)
    return SamplingParams(
        **values(message, _PLAIN_OF_SAMPLING),
        logprobs=logprobs if message.HasField("logprobs") else None,
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=tuple(sorted(message.logit_bias.items())),
        allowed_token_ids=tuple(message.allowed_token_ids),
        bad_words=tuple(tuple(word.token_ids) for word in message.bad_words),
        structure=structure_from_wire(message),
        beam=_beam_from_wire(message.beam) if message.HasField("beam") else None,
    )


def structure_from_wire(
    message: ticket_pb2.TicketSampling | sampling_pb2.SamplingParams,
) -> Structure | None:
    """Raises InvalidRequest if the kind is unknown, or the text too long."""
    if not message.HasField("structured_output"):
        return None
    kind, text = message.structured_output.kind, message.structured_output.text
    size = len(text.encode())
    require(
        size <= MAX_STRUCTURE_BYTES,
        f"structured_output has {size} bytes, at most {MAX_STRUCTURE_BYTES}",
    )
    return Structure(STRUCTURE_KINDS.member(kind, "structured_output: kind"), text)


def early_stopping_from_wire(number: sampling_pb2.EarlyStopping) -> EarlyStopping:
    """Raises InvalidRequest if the value is unknown."""
    return EARLY_STOPPING.member(number or sampling_pb2.EARLY_STOPPING_FALSE, "early_stopping")


def _beam_from_wire(message: ticket_pb2.BeamParams) -> BeamParams:
    width, num_returned = message.width, message.num_returned
    require(0 < num_returned <= width <= MAX_BEAM_WIDTH, f"{num_returned} of {width} beams")
    early_stopping = early_stopping_from_wire(message.early_stopping)
    return BeamParams(width, num_returned, message.length_penalty, early_stopping)


def num_top_from_wire(number: int) -> int:
    """How many of the likeliest tokens to report. Raises InvalidRequest if above MAX_LOGPROBS."""
    require(number <= MAX_LOGPROBS, f"logprobs is {number}")
    return number
