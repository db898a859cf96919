"""Converts tickets, their states, logprobs and loads to protobuf messages and back.

A worker checks the ticket that it receives: a malformed ticket raises InvalidRequest here, before
the worker reads wrong memory. A gateway checks no message of a worker, since workers prove that
they know the deployment's secret.
"""

import math
from itertools import pairwise

from blockstore.registry import Load
from quire.v1 import ticket_pb2, worker_pb2
from services.protocol.fields import FINISH_REASONS, from_wire, require, to_fields
from services.protocol.messages import LoadReport
from services.protocol.sampling_codec import sampling_from_wire
from services.protocol.ticket import (
    MAX_BEAM_WIDTH,
    MAX_LENGTH_PENALTY,
    MAX_SEQUENCES,
    Ticket,
    TicketState,
)
from services.runtime.tracing.context import MAX_TRACEPARENT_CHARS

ROOT_HASH_BYTES = 16
_MAX_ORDER = 1 << 52
_MAX_EPOCH = 1 << 53
MAX_NAME_CHARS = 256
MAX_PATH_CHARS = 4096
MAX_REQUEST_ID_CHARS = 320
"""The client's id has at most 256 characters; the gateway adds the others."""


def ticket_to_wire(ticket: Ticket) -> ticket_pb2.Ticket:
    return ticket_pb2.Ticket(**to_fields(ticket))


def ticket_from_wire(message: ticket_pb2.Ticket) -> Ticket:
    """Check and convert a ticket. Raises InvalidRequest, which names what is wrong."""
    check_request_id(message.request_id)
    _check_holder(message)
    require(message.order < _MAX_ORDER, "order is not below 2**52")
    require(len(message.root_hash) == ROOT_HASH_BYTES, f"root_hash is not {ROOT_HASH_BYTES} bytes")
    require(bool(message.prompt_token_ids), "prompt_token_ids is empty")
    require(message.HasField("sampling"), "sampling is missing")
    require(bool(message.sequences), "sequences is empty")
    require(len(message.traceparent) <= MAX_TRACEPARENT_CHARS, "traceparent is too long")
    num_prompt_tokens = len(message.prompt_token_ids)
    require(message.num_cached_tokens <= num_prompt_tokens, "num_cached_tokens > prompt")
    indices = [sequence.index for sequence in message.sequences]
    require(indices == sorted(set(indices)), "sequence indices are not ascending")
    require(indices[-1] < MAX_SEQUENCES, f"a sequence has index {indices[-1]}")
    for sequence in message.sequences:
        _check_sequence(sequence, num_prompt_tokens)
    _check_beams(message)
    if message.HasField("swapped"):
        _check_swapped(message)
    for name in ("name", "path", "digest") if message.HasField("adapter") else ():
        value = getattr(message.adapter, name)
        require(0 < len(value) <= MAX_PATH_CHARS, f"adapter.{name} has {len(value)} characters")
    return from_wire(Ticket, message, sampling=sampling_from_wire(message))


def state_to_wire(state: TicketState) -> ticket_pb2.TicketState:
    return ticket_pb2.TicketState(**to_fields(state.state))


def check_request_id(request_id: str) -> None:
    """Raises InvalidRequest if the id is empty or too long."""
    require(bool(request_id), "request_id is empty")
    require(len(request_id) <= MAX_REQUEST_ID_CHARS, "request_id is too long")


def load_to_wire(report: LoadReport) -> worker_pb2.WorkerLoad:
    return worker_pb2.WorkerLoad(**to_fields(report.load), draining=report.draining)


def load_from_wire(message: worker_pb2.WorkerLoad) -> LoadReport:
    return LoadReport(from_wire(Load, message), message.draining)


def _check_beams(message: ticket_pb2.Ticket) -> None:
    """Check the parameters and the state of a beam search. The ticket's sequences must be the beams
    that have not finished."""
    if message.sampling.HasField("beam"):
        num_returned, beam = message.sampling.n, message.sampling.beam
        is_in_range = 0 < num_returned <= beam.width <= MAX_BEAM_WIDTH
        require(is_in_range, f"{num_returned} of {beam.width} beams")
        penalty = beam.length_penalty
        require(abs(penalty) <= MAX_LENGTH_PENALTY, f"length_penalty is {penalty}")
    if not message.HasField("beams"):
        begun = len(message.sequences) > 1 or any(one.token_ids for one in message.sequences)
        is_search = message.sampling.HasField("beam")
        require(not (is_search and begun), "a search has begun, and beams is missing")
        return
    beams, width = message.beams, message.sampling.beam.width
    scores = tuple(beams.scores)
    require(len(beams.finished) <= width, f"{len(beams.finished)} finished of {width} beams")
    require(0 < len(scores) <= width, f"{len(scores)} scores of {width} beams")
    require(all(map(math.isfinite, scores)), "a score is not finite")
    require(all(a >= b for a, b in pairwise(scores)), "scores do not fall")
    indices = [sequence.index for sequence in message.sequences]
    require(indices == list(range(len(scores))), "sequences are not the beams")
    lengths = {len(sequence.token_ids) for sequence in message.sequences}
    require(len(lengths) == 1, "beams of different lengths")
    for one in beams.finished:
        has_ended = one.finish_reason in FINISH_REASONS.members
        require(has_ended, "a hypothesis that has not ended")
        require(bool(one.token_ids), "a hypothesis without tokens")
        require(math.isfinite(one.score), "a score is not finite")
    longest = max((len(one.token_ids) for one in beams.finished), default=0)
    most = message.sampling.max_tokens
    require(longest <= most, f"a hypothesis of {longest} tokens, of {most} at most")


def _check_sequence(message: ticket_pb2.TicketSequence, num_prompt_tokens: int) -> None:
    num_tokens = num_prompt_tokens + len(message.token_ids)
    require(
        message.num_computed_tokens <= num_tokens,
        f"num_computed_tokens is {message.num_computed_tokens} of {num_tokens} tokens",
    )
    require(
        bool(message.block_ids) or message.num_computed_tokens == 0,
        "computed tokens, but no blocks",
    )


def _check_swapped(message: ticket_pb2.Ticket) -> None:
    swapped = message.swapped
    _check_holder(swapped)
    with_blocks = any(sequence.block_ids for sequence in message.sequences)
    require(not with_blocks, "swapped out, but with blocks")
    require(bool(swapped.pool_id), "swapped out to nowhere")
    require(all(table.block_ids for table in swapped.tables), "swapped out, but a table is empty")
    indices = [table.index for table in swapped.tables]
    require(indices == sorted(set(indices)), "tables that were swapped out do not ascend")
    require(len(indices) <= MAX_SEQUENCES, f"{len(indices)} tables were swapped out")
    wanted = {sequence.index for sequence in message.sequences}
    is_whole = bool(wanted) and wanted.issubset(indices)
    require(is_whole, "not all sequences were swapped out")


def _check_holder(message: ticket_pb2.Ticket | ticket_pb2.Swapped) -> None:
    """Refuse names and epochs that the block store would reject as invalid arguments."""
    require(bool(message.holder_id), "holder_id is empty")
    for name in ("pool_id", "holder_id"):
        require(len(getattr(message, name)) <= MAX_NAME_CHARS, f"{name} is too long")
    require(message.holder_epoch < _MAX_EPOCH, "holder_epoch is not below 2**53")
