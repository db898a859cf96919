"""Converts sampling parameters to protobuf messages and back.

Floats have 32 bits in messages: a value that was in a message once does not change any more. An
invalid parameter raises InvalidRequest.
"""

from dataclasses import fields

from quire.v1 import sampling_pb2, ticket_pb2
from services.common.structured.structure import MAX_STRUCTURE_BYTES, Structure, StructureKind
from services.protocol.fields import require, values
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
    PoolingMode,
    SamplingParams,
)

_MAX_TOP_K = 1 << 31
_CONVERTED = {
    *("logprobs", "stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words"),
    *("structure", "beam", "pooling"),
}
_PLAIN_OF_SAMPLING = [f.name for f in fields(SamplingParams) if f.name not in _CONVERTED]
"""Fields that are equal in the dataclass and in the message."""

_EARLY_STOPPING = {
    EarlyStopping.WHEN_UNLIKELY: sampling_pb2.EARLY_STOPPING_FALSE,
    EarlyStopping.WHEN_FULL: sampling_pb2.EARLY_STOPPING_TRUE,
    EarlyStopping.WHEN_IMPOSSIBLE: sampling_pb2.EARLY_STOPPING_NEVER,
}
_EARLY_STOPPING_FROM_WIRE = {number: when for when, number in _EARLY_STOPPING.items()} | {
    sampling_pb2.EARLY_STOPPING_UNSPECIFIED: EarlyStopping.WHEN_UNLIKELY
}
_STRUCTURE_KINDS = {
    sampling_pb2.StructureKind.Value(f"STRUCTURE_KIND_{kind.name}"): kind for kind in StructureKind
}

_MODES = {
    PoolingMode.LAST: ticket_pb2.Pooling.MODE_LAST,
    PoolingMode.MEAN: ticket_pb2.Pooling.MODE_MEAN,
}
_MODES_FROM_WIRE = {number: mode for mode, number in _MODES.items()}


def sampling_to_wire(sampling: SamplingParams) -> ticket_pb2.TicketSampling:
    return ticket_pb2.TicketSampling(
        **values(sampling, _PLAIN_OF_SAMPLING),
        logprobs=sampling.logprobs,
        stop_token_ids=sampling.stop_token_ids,
        logit_bias=dict(sampling.logit_bias),
        allowed_token_ids=sampling.allowed_token_ids,
        bad_words=[ticket_pb2.BadWord(token_ids=word) for word in sampling.bad_words],
        structured_output=None if sampling.structure is None else _structure(sampling.structure),
        beam=None if sampling.beam is None else _beam_to_wire(sampling.beam),
        pooling=None if sampling.pooling is None else _pooling_to_wire(sampling.pooling),
    )


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


def _structure(structure: Structure) -> sampling_pb2.StructuredOutput:
    kind = f"STRUCTURE_KIND_{structure.kind.name}"
    return sampling_pb2.StructuredOutput(kind=kind, text=structure.text)


def structure_from_wire(
    message: ticket_pb2.TicketSampling | sampling_pb2.SamplingParams,
) -> Structure | None:
    """Raises InvalidRequest if the kind is unknown, or the text too long."""
    if not message.HasField("structured_output"):
        return None
    kind, text = message.structured_output.kind, message.structured_output.text
    require(kind in _STRUCTURE_KINDS, f"structured_output: kind {kind} is unknown")
    size = len(text.encode())
    require(
        size <= MAX_STRUCTURE_BYTES,
        f"structured_output has {size} bytes, at most {MAX_STRUCTURE_BYTES}",
    )
    return Structure(_STRUCTURE_KINDS[kind], text)


def early_stopping_from_wire(number: sampling_pb2.EarlyStopping) -> EarlyStopping:
    """Raises InvalidRequest if the value is unknown."""
    require(number in _EARLY_STOPPING_FROM_WIRE, f"early_stopping {number} is unknown")
    return _EARLY_STOPPING_FROM_WIRE[number]


def _beam_to_wire(beam: BeamParams) -> ticket_pb2.BeamParams:
    return ticket_pb2.BeamParams(
        width=beam.width,
        num_returned=beam.num_returned,
        length_penalty=beam.length_penalty,
        early_stopping=_EARLY_STOPPING[beam.early_stopping],
    )


def _beam_from_wire(message: ticket_pb2.BeamParams) -> BeamParams:
    width, num_returned = message.width, message.num_returned
    require(0 < num_returned <= width <= MAX_BEAM_WIDTH, f"{num_returned} of {width} beams")
    penalty = message.length_penalty
    require(abs(penalty) <= MAX_LENGTH_PENALTY, f"length_penalty is {penalty}")
    early_stopping = early_stopping_from_wire(message.early_stopping)
    return BeamParams(width, num_returned, penalty, early_stopping)


def _pooling_to_wire(pooling: Pooling) -> ticket_pb2.Pooling:
    return ticket_pb2.Pooling(mode=_MODES[pooling.mode], dimensions=pooling.dimensions)


def _pooling_from_wire(message: ticket_pb2.Pooling) -> Pooling:
    mode, dimensions = _MODES_FROM_WIRE.get(message.mode), message.dimensions
    require(mode is not None, f"pooling mode {message.mode} is unknown")
    require(0 < dimensions <= MAX_DIMENSIONS, f"{dimensions} dimensions")
    assert mode is not None
    return Pooling(mode, dimensions)


def num_top_from_wire(number: int) -> int:
    """How many of the likeliest tokens to report. Raises InvalidRequest if above MAX_LOGPROBS."""
    require(number <= MAX_LOGPROBS, f"logprobs is {number}")
    return number
