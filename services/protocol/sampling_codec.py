"""Checks the sampling parameters in protobuf messages, and converts them.

Floats have 32 bits in messages: a value that was in a message once does not change any more. An
invalid parameter raises InvalidRequest.
"""

from dataclasses import fields

from quire.v1 import sampling_pb2, ticket_pb2
from services.model.structured.structure import MAX_STRUCTURE_BYTES, Structure
from services.protocol.fields import (
    EARLY_STOPPING,
    POOLING_MODES,
    STRUCTURE_KINDS,
    require,
    values,
)
from services.protocol.logprobs import MAX_LOGPROBS
from services.protocol.sampling_numbers import NUMBERS
from services.protocol.ticket import (
    MAX_BEAM_WIDTH,
    MAX_BIAS,
    MAX_DIMENSIONS,
    MAX_LENGTH_PENALTY,
    BeamParams,
    EarlyStopping,
    Pooling,
    SamplingParams,
)

_MAX_TOP_K = 1 << 31
_CONVERTED = {
    *("logprobs", "stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words"),
    *("structure", "beam", "pooling"),
}
_PLAIN_OF_SAMPLING = [f.name for f in fields(SamplingParams) if f.name not in _CONVERTED]
"""Fields that are equal in the dataclass and in the message."""


def sampling_from_wire(message: ticket_pb2.TicketSampling) -> SamplingParams:
    for name, number in NUMBERS.items():
        value = getattr(message, name)
        require(number.accepts(value), f"{name} is {value}")
    require(message.top_k < _MAX_TOP_K, f"top_k is {message.top_k}")
    require(message.max_tokens > 0, "max_tokens is 0")
    logprobs = num_top_from_wire(message.logprobs)
    _check_adjustments(message)
    return SamplingParams(
        **values(message, _PLAIN_OF_SAMPLING),
        logprobs=logprobs if message.HasField("logprobs") else None,
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=tuple(sorted(message.logit_bias.items())),
        allowed_token_ids=tuple(message.allowed_token_ids),
        bad_words=tuple(tuple(word.token_ids) for word in message.bad_words),
        structure=structure_from_wire(message),
        beam=_beam_from_wire(message.beam) if message.HasField("beam") else None,
        pooling=_pooling_from_wire(message.pooling) if message.HasField("pooling") else None,
    )


def _check_adjustments(message: ticket_pb2.TicketSampling) -> None:
    """Check the biases, bad words and min_tokens. NaN fails every comparison, so it is refused."""
    for token_id, bias in message.logit_bias.items():
        require(-MAX_BIAS <= bias <= MAX_BIAS, f"logit_bias of {token_id} is {bias}")
    require(all(word.token_ids for word in message.bad_words), "a bad word has no tokens")
    require(
        message.min_tokens <= message.max_tokens,
        f"min_tokens is {message.min_tokens}, max_tokens {message.max_tokens}",
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
    penalty = message.length_penalty
    require(abs(penalty) <= MAX_LENGTH_PENALTY, f"length_penalty is {penalty}")
    early_stopping = early_stopping_from_wire(message.early_stopping)
    return BeamParams(width, num_returned, penalty, early_stopping)


def _pooling_from_wire(message: ticket_pb2.Pooling) -> Pooling:
    mode, dimensions = POOLING_MODES.member(message.mode, "pooling mode"), message.dimensions
    require(0 < dimensions <= MAX_DIMENSIONS, f"{dimensions} dimensions")
    return Pooling(mode, dimensions)


def num_top_from_wire(number: int) -> int:
    """How many of the likeliest tokens to report. Raises InvalidRequest if above MAX_LOGPROBS."""
    require(number <= MAX_LOGPROBS, f"logprobs is {number}")
    return number
