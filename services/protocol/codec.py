"""Converts tickets, logprobs and loads to protobuf messages and back.

Sampling parameters are 32-bit floats in messages: a value that was in a message once does not
change any more. Every received message is checked: a malformed ticket raises InvalidRequest here,
before a worker reads wrong memory.
"""

import math
from itertools import pairwise

from blockstore.registry import Load
from quire.v1 import logprobs_pb2, sampling_pb2, ticket_pb2, worker_pb2
from services.common.errors import InvalidRequest
from services.protocol.logprobs import MAX_LOGPROBS, Logprobs
from services.protocol.ticket import (
    MAX_BEAM_WIDTH,
    MAX_LENGTH_PENALTY,
    MAX_SEQUENCES,
    MOST_BIAS,
    MOST_PENALTY,
    BeamParams,
    BeamState,
    EarlyStopping,
    FinishReason,
    Hypothesis,
    SamplingParams,
    Swapped,
    SwappedTable,
    Ticket,
    TicketSequence,
)

ROOT_HASH_BYTES = 16
_MAX_ORDER = 1 << 52
_MAX_EPOCH = 1 << 53
_MAX_TOP_K = 1 << 31
MAX_NAME_CHARS = 256
MAX_REQUEST_ID_CHARS = 320
"""256 characters of the client's id, and what the gateway adds to it."""

_FINISH_REASONS = {
    FinishReason.STOP: sampling_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: sampling_pb2.FINISH_REASON_LENGTH,
}
_FROM_WIRE = {number: reason for reason, number in _FINISH_REASONS.items()}
_EARLY_STOPPING = {
    EarlyStopping.WHEN_UNLIKELY: sampling_pb2.EARLY_STOPPING_FALSE,
    EarlyStopping.WHEN_FULL: sampling_pb2.EARLY_STOPPING_TRUE,
    EarlyStopping.WHEN_IMPOSSIBLE: sampling_pb2.EARLY_STOPPING_NEVER,
}
_EARLY_STOPPING_FROM_WIRE = {number: when for when, number in _EARLY_STOPPING.items()} | {
    sampling_pb2.EARLY_STOPPING_UNSPECIFIED: EarlyStopping.WHEN_UNLIKELY
}


def ticket_to_wire(ticket: Ticket) -> ticket_pb2.Ticket:
    return ticket_pb2.Ticket(
        request_id=ticket.request_id,
        attempt=ticket.attempt,
        order=ticket.order,
        pool_id=ticket.pool_id,
        holder_id=ticket.holder_id,
        holder_epoch=ticket.holder_epoch,
        root_hash=ticket.root_hash,
        prompt_token_ids=ticket.prompt_token_ids,
        sampling=_sampling_to_wire(ticket.sampling),
        sequences=map(_sequence_to_wire, ticket.sequences),
        num_cached_tokens=ticket.num_cached_tokens,
        timeout_ms=ticket.timeout_ms,
        swapped=None if ticket.swapped is None else _swapped_to_wire(ticket.swapped),
        prefill_ns_per_token=ticket.prefill_ns_per_token,
        beams=None if ticket.beams is None else _beams_to_wire(ticket.beams),
    )


def ticket_from_wire(message: ticket_pb2.Ticket, *, may_have_ended: bool = False) -> Ticket:
    """Check and convert a ticket. `may_have_ended`: accept a ticket without sequences. Raises
    InvalidRequest, which names what is wrong."""
    check_request_id(message.request_id)
    _check_holder(message)
    _require(message.order < _MAX_ORDER, "order is not below 2**52")
    _require(len(message.root_hash) == ROOT_HASH_BYTES, f"root_hash is not {ROOT_HASH_BYTES} bytes")
    _require(bool(message.prompt_token_ids), "prompt_token_ids is empty")
    _require(message.HasField("sampling"), "sampling is missing")
    _require(may_have_ended or bool(message.sequences), "sequences is empty")
    num_prompt_tokens = len(message.prompt_token_ids)
    _require(message.num_cached_tokens <= num_prompt_tokens, "num_cached_tokens > prompt")
    indices = [sequence.index for sequence in message.sequences]
    _require(indices == sorted(set(indices)), "sequence indices are not ascending")
    _require(max(indices, default=0) < MAX_SEQUENCES, f"no sequence has index {indices[-1:]}")
    return Ticket(
        request_id=message.request_id,
        attempt=message.attempt,
        order=message.order,
        pool_id=message.pool_id,
        holder_id=message.holder_id,
        holder_epoch=message.holder_epoch,
        root_hash=message.root_hash,
        prompt_token_ids=tuple(message.prompt_token_ids),
        sampling=_sampling_from_wire(message.sampling),
        sequences=tuple(_sequence_from_wire(s, num_prompt_tokens) for s in message.sequences),
        num_cached_tokens=message.num_cached_tokens,
        timeout_ms=message.timeout_ms,
        swapped=_swapped_from_wire(message) if message.HasField("swapped") else None,
        prefill_ns_per_token=message.prefill_ns_per_token,
        beams=_beams_from_wire(message),
    )


def check_request_id(request_id: str) -> None:
    """Raises InvalidRequest if the id is empty or too long."""
    _require(bool(request_id), "request_id is empty")
    _require(len(request_id) <= MAX_REQUEST_ID_CHARS, "request_id is too long")


def finish_reason_to_wire(reason: FinishReason | None) -> sampling_pb2.FinishReason:
    """`reason` is None while the sequence runs: FINISH_REASON_UNSPECIFIED."""
    if reason is None:
        return sampling_pb2.FINISH_REASON_UNSPECIFIED
    return _FINISH_REASONS[reason]


def finish_reason_from_wire(number: sampling_pb2.FinishReason) -> FinishReason | None:
    """The reason; None while the sequence runs. Raises InvalidRequest if it is unknown."""
    if number == sampling_pb2.FINISH_REASON_UNSPECIFIED:
        return None
    _require(number in _FROM_WIRE, f"finish_reason {number} is unknown")
    return _FROM_WIRE[number]


def logprobs_to_wire(logprobs: Logprobs) -> logprobs_pb2.Logprobs:
    return logprobs_pb2.Logprobs(
        logprob=logprobs.logprob,
        rank=logprobs.rank,
        top_token_ids=logprobs.top_token_ids,
        top_logprobs=logprobs.top_logprobs,
    )


def num_top_from_wire(number: int) -> int:
    """How many of the likeliest tokens to report. Raises InvalidRequest if above MAX_LOGPROBS."""
    _require(number <= MAX_LOGPROBS, f"logprobs is {number}")
    return number


def logprobs_from_wire(message: logprobs_pb2.Logprobs) -> Logprobs:
    """Check and convert logprobs. Raises InvalidRequest if no model can report them."""
    top = message.top_logprobs
    _require(len(top) <= MAX_LOGPROBS, f"{len(top)} top_logprobs")
    _require(len(top) == len(message.top_token_ids), "top_logprobs are not of top_token_ids")
    _require(message.rank > 0, "rank is 0")
    # `<=` refuses NaN too.
    _require(message.logprob <= 0, f"logprob is {message.logprob}")
    _require(all(value <= 0 for value in top), "a logprob is not 0 or less")
    _require(all(a >= b for a, b in pairwise(top)), "top_logprobs do not fall")
    return Logprobs(message.logprob, message.rank, tuple(message.top_token_ids), tuple(top))


def load_to_wire(load: Load, draining: bool, stalled: bool = False) -> worker_pb2.WorkerLoad:
    return worker_pb2.WorkerLoad(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_free_slots=load.num_free_slots,
        num_pending_tokens=load.num_pending_tokens,
        draining=draining,
        stalled=stalled,
    )


def load_from_wire(message: worker_pb2.WorkerLoad) -> tuple[Load, bool, bool]:
    """(load, draining, stalled). A stalled worker waits for its store."""
    load = Load(
        message.num_running,
        message.num_waiting,
        message.num_free_slots,
        message.num_pending_tokens,
    )
    return load, message.draining, message.stalled


def _sampling_to_wire(sampling: SamplingParams) -> ticket_pb2.TicketSampling:
    return ticket_pb2.TicketSampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        allowed_token_ids=sampling.allowed_token_ids,
        bad_words=[ticket_pb2.BadWord(token_ids=word) for word in sampling.bad_words],
        min_tokens=sampling.min_tokens,
        beam=None if sampling.beam is None else _beam_to_wire(sampling.beam),
    )


def _sampling_from_wire(message: ticket_pb2.TicketSampling) -> SamplingParams:
    temperature, top_p, min_p = message.temperature, message.top_p, message.min_p
    _require(math.isfinite(temperature) and temperature >= 0, f"temperature is {temperature}")
    _require(0 < top_p <= 1, f"top_p is {top_p}")
    _require(0 <= min_p <= 1, f"min_p is {min_p}")
    _require(message.top_k < _MAX_TOP_K, f"top_k is {message.top_k}")
    _require(message.max_tokens > 0, "max_tokens is 0")
    logprobs = num_top_from_wire(message.logprobs)
    _check_adjustments(message)
    return SamplingParams(
        temperature=temperature,
        top_k=message.top_k,
        top_p=top_p,
        min_p=min_p,
        seed=message.seed,
        max_tokens=message.max_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        logprobs=logprobs if message.HasField("logprobs") else None,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        allowed_token_ids=tuple(message.allowed_token_ids),
        bad_words=tuple(tuple(word.token_ids) for word in message.bad_words),
        min_tokens=message.min_tokens,
        beam=_beam_from_wire(message.beam) if message.HasField("beam") else None,
    )


def _check_adjustments(message: ticket_pb2.TicketSampling) -> None:
    """Check the parameters that adjust logits. NaN fails every comparison, so it is refused."""
    repetition = message.repetition_penalty
    _require(0 < repetition < math.inf, f"repetition_penalty is {repetition}")
    for name in ("presence_penalty", "frequency_penalty"):
        penalty = getattr(message, name)
        _require(-MOST_PENALTY <= penalty <= MOST_PENALTY, f"{name} is {penalty}")
    for token_id, bias in message.logit_bias.items():
        _require(-MOST_BIAS <= bias <= MOST_BIAS, f"logit_bias of {token_id} is {bias}")
    _require(all(word.token_ids for word in message.bad_words), "a bad word has no tokens")
    _require(
        message.min_tokens <= message.max_tokens,
        f"min_tokens is {message.min_tokens}, max_tokens {message.max_tokens}",
    )


def early_stopping_from_wire(number: sampling_pb2.EarlyStopping) -> EarlyStopping:
    """Raises InvalidRequest if the value is unknown."""
    _require(number in _EARLY_STOPPING_FROM_WIRE, f"early_stopping {number} is unknown")
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
    _require(0 < num_returned <= width <= MAX_BEAM_WIDTH, f"{num_returned} of {width} beams")
    penalty = message.length_penalty
    _require(abs(penalty) <= MAX_LENGTH_PENALTY, f"length_penalty is {penalty}")
    early_stopping = early_stopping_from_wire(message.early_stopping)
    return BeamParams(width, num_returned, penalty, early_stopping)


def _beams_to_wire(beams: BeamState) -> ticket_pb2.BeamState:
    finished = [
        ticket_pb2.Hypothesis(
            token_ids=one.token_ids,
            score=one.score,
            finish_reason=finish_reason_to_wire(one.finish),
        )
        for one in beams.finished
    ]
    return ticket_pb2.BeamState(scores=beams.scores, finished=finished)


def _beams_from_wire(message: ticket_pb2.Ticket) -> BeamState | None:
    """Check and convert the state of a beam search. The sequences of the ticket must be its living
    beams."""
    if not message.HasField("beams"):
        begun = len(message.sequences) > 1 or any(one.token_ids for one in message.sequences)
        is_search = message.sampling.HasField("beam")
        _require(not (is_search and begun), "a search has begun, and beams is missing")
        return None
    beams, width = message.beams, message.sampling.beam.width
    scores = tuple(beams.scores)
    _require(len(beams.finished) <= width, f"{len(beams.finished)} finished of {width} beams")
    _require(0 < len(scores) <= width, f"{len(scores)} scores of {width} beams")
    _require(all(map(math.isfinite, scores)), "a score is not finite")
    _require(all(a >= b for a, b in pairwise(scores)), "scores do not fall")
    indices = [sequence.index for sequence in message.sequences]
    _require(indices == list(range(len(scores))), "sequences are not the beams")
    lengths = {len(sequence.token_ids) for sequence in message.sequences}
    _require(len(lengths) == 1, "beams of different lengths")
    finished = tuple(map(_hypothesis_from_wire, beams.finished))
    longest = max((len(one.token_ids) for one in finished), default=0)
    most = message.sampling.max_tokens
    _require(longest <= most, f"a hypothesis of {longest} tokens, of {most} at most")
    return BeamState(scores, finished)


def _hypothesis_from_wire(message: ticket_pb2.Hypothesis) -> Hypothesis:
    finish = finish_reason_from_wire(message.finish_reason)
    _require(finish is not None, "a hypothesis that has not ended")
    _require(bool(message.token_ids), "a hypothesis without tokens")
    _require(math.isfinite(message.score), "a score is not finite")
    assert finish is not None
    return Hypothesis(tuple(message.token_ids), message.score, finish)


def _sequence_to_wire(sequence: TicketSequence) -> ticket_pb2.TicketSequence:
    return ticket_pb2.TicketSequence(
        index=sequence.index,
        token_ids=sequence.token_ids,
        block_ids=sequence.block_ids,
        num_computed_tokens=sequence.num_computed_tokens,
    )


def _sequence_from_wire(
    message: ticket_pb2.TicketSequence, num_prompt_tokens: int
) -> TicketSequence:
    num_tokens = num_prompt_tokens + len(message.token_ids)
    _require(
        message.num_computed_tokens <= num_tokens,
        f"num_computed_tokens is {message.num_computed_tokens} of {num_tokens} tokens",
    )
    _require(
        bool(message.block_ids) or message.num_computed_tokens == 0,
        "computed tokens, but no blocks",
    )
    return TicketSequence(
        index=message.index,
        token_ids=tuple(message.token_ids),
        block_ids=tuple(message.block_ids),
        num_computed_tokens=message.num_computed_tokens,
    )


def _swapped_to_wire(swapped: Swapped) -> ticket_pb2.Swapped:
    return ticket_pb2.Swapped(
        pool_id=swapped.pool_id,
        holder_id=swapped.holder_id,
        holder_epoch=swapped.holder_epoch,
        tables=[
            ticket_pb2.SwappedTable(index=table.index, block_ids=table.block_ids)
            for table in swapped.tables
        ],
    )


def _swapped_from_wire(message: ticket_pb2.Ticket) -> Swapped:
    swapped = message.swapped
    _check_holder(swapped)
    tables = tuple(SwappedTable(one.index, tuple(one.block_ids)) for one in swapped.tables)
    with_blocks = any(sequence.block_ids for sequence in message.sequences)
    _require(not with_blocks, "swapped out, but with blocks")
    _require(bool(swapped.pool_id), "swapped out to nowhere")
    _require(all(table.block_ids for table in tables), "swapped out, but a table is empty")
    indices = [table.index for table in tables]
    _require(indices == sorted(set(indices)), "tables that were swapped out do not ascend")
    _require(len(indices) <= MAX_SEQUENCES, f"{len(indices)} tables were swapped out")
    wanted = {sequence.index for sequence in message.sequences}
    is_whole = bool(wanted) and wanted.issubset(indices)
    _require(is_whole, "not all sequences were swapped out")
    return Swapped(swapped.pool_id, swapped.holder_id, swapped.holder_epoch, tables)


def _check_holder(message: ticket_pb2.Ticket | ticket_pb2.Swapped) -> None:
    """Refuse names and epochs that the block store would reject as invalid arguments."""
    _require(bool(message.holder_id), "holder_id is empty")
    for name in ("pool_id", "holder_id"):
        _require(len(getattr(message, name)) <= MAX_NAME_CHARS, f"{name} is too long")
    _require(message.holder_epoch < _MAX_EPOCH, "holder_epoch is not below 2**53")


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise InvalidRequest(f"malformed message: {problem}")
