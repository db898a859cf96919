"""The ticket on the wire: the round trip is exact, and invalid messages are refused."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockstore.registry import Load
from quire.types import Beam
from quire.v1.logprobs_pb2 import Logprobs as LogprobsMessage
from quire.v1.sampling_pb2 import StructuredOutput
from quire.v1.ticket_pb2 import Ticket as Message
from quire.v1.worker_pb2 import WorkerLoad
from services.model.structured.structure import MAX_STRUCTURE_BYTES, Structure, StructureKind
from services.protocol.codec import (
    load_from_wire,
    load_to_wire,
    ticket_from_wire,
    ticket_to_wire,
)
from services.protocol.fields import from_wire, to_fields
from services.protocol.logprobs import Logprobs
from services.protocol.messages import LoadReport
from services.protocol.ticket import (
    MAX_BEAM_WIDTH,
    MAX_LENGTH_PENALTY,
    BeamState,
    FinishReason,
    Hypothesis,
    SamplingParams,
    Swapped,
    SwappedTable,
    Ticket,
    TicketSequence,
)
from services.runtime.errors import InvalidRequest

no_deadline = settings(deadline=None)  # how fast the machine is, is no property

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
token_ids = st.lists(u32, max_size=6).map(tuple)
some_token_ids = st.lists(u32, min_size=1, max_size=6).map(tuple)


def real(low: float, high: float, **bounds: bool) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32, allow_nan=False, **bounds)


samplings = st.builds(
    SamplingParams,
    temperature=real(0, 1e6),
    top_k=st.integers(0, 2**31 - 1),
    top_p=real(0, 1, exclude_min=True),
    min_p=real(0, 1),
    seed=u64,
    max_tokens=st.integers(1, 2**32 - 1),
    stop_token_ids=token_ids,
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    repetition_penalty=real(0, 1e6, exclude_min=True),
    presence_penalty=real(-2, 2),
    frequency_penalty=real(-2, 2),
    logit_bias=st.dictionaries(u32, real(-100, 100), max_size=4).map(
        lambda biases: tuple(sorted(biases.items()))
    ),
    allowed_token_ids=token_ids,
    bad_words=st.lists(some_token_ids, max_size=3).map(tuple),
    min_tokens=st.integers(0, 1),
    structure=st.none()
    | st.builds(Structure, st.sampled_from(StructureKind), st.text(max_size=20)),
)


@st.composite
def tickets(draw: st.DrawFn) -> Ticket:
    prompt = draw(some_token_ids)

    def sequence(index: int) -> TicketSequence:
        tokens, blocks = draw(token_ids), draw(token_ids)
        most = len(prompt) + len(tokens) if blocks else 0
        return TicketSequence(index, tokens, blocks, draw(st.integers(0, most)))

    return Ticket(
        request_id=draw(st.text(min_size=1, max_size=8)),
        attempt=draw(u32),
        order=draw(st.integers(0, 2**52 - 1)),
        pool_id=draw(st.text(max_size=8)),
        holder_id=draw(st.text(min_size=1, max_size=8)),
        holder_epoch=draw(st.integers(0, 2**53 - 1)),
        root_hash=draw(st.binary(min_size=16, max_size=16)),
        prompt_token_ids=prompt,
        sampling=draw(samplings),
        sequences=tuple(map(sequence, range(draw(st.integers(1, 3))))),
        num_cached_tokens=draw(st.integers(0, len(prompt))),
        timeout_ms=draw(u64),
        prefill_ns_per_token=draw(u32),
        traceparent=draw(st.text(max_size=8)),
    )


@st.composite
def swapped_tickets(draw: st.DrawFn) -> Ticket:
    indices = draw(st.lists(st.integers(0, 63), min_size=1, max_size=4, unique=True))
    tables = tuple(SwappedTable(index, draw(some_token_ids)) for index in sorted(indices))
    there = draw(st.sets(st.sampled_from(indices), min_size=1))
    sequences = tuple(TicketSequence(index, draw(some_token_ids)) for index in sorted(there))
    name, epoch = st.text(min_size=1, max_size=8), draw(st.integers(0, 2**53 - 1))
    swapped = Swapped(draw(name), draw(name), epoch, tables)
    return replace(draw(tickets()), sequences=sequences, swapped=swapped)


@st.composite
def searching_tickets(draw: st.DrawFn) -> Ticket:
    ticket = draw(tickets())
    width = draw(st.integers(1, MAX_BEAM_WIDTH))
    beam = Beam(
        width,
        draw(st.floats(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)),
        draw(st.sampled_from((False, True, "never"))),
    )
    n = draw(st.integers(1, width))
    most = max(ticket.sampling.max_tokens, 6)
    ticket = replace(ticket, sampling=replace(ticket.sampling, max_tokens=most, n=n, beam=beam))
    if draw(st.booleans()):  # it has not begun
        return replace(ticket, sequences=(TicketSequence(0),))
    num_tokens = draw(st.integers(1, 3))
    scores = sorted(draw(st.lists(real(-1e6, 0), min_size=1, max_size=width)), reverse=True)
    tokens = st.lists(u32, min_size=num_tokens, max_size=num_tokens).map(tuple)
    finished = st.builds(Hypothesis, some_token_ids, real(-1e6, 0), st.sampled_from(FinishReason))
    return replace(
        ticket,
        sequences=tuple(TicketSequence(index, draw(tokens)) for index in range(len(scores))),
        beams=BeamState(tuple(scores), tuple(draw(st.lists(finished, max_size=width)))),
    )


TICKET = Ticket(
    request_id="r-1",
    attempt=1,
    order=7,
    pool_id="p-1",
    holder_id="h-1",
    holder_epoch=2,
    root_hash=bytes(16),
    prompt_token_ids=(5, 6, 7),
    sampling=SamplingParams(0.5, 0, 1.0, 0.0, 42, 8),
    sequences=(TicketSequence(0, (8,), (3,), 3),),
)


@no_deadline
@given(tickets() | swapped_tickets() | searching_tickets())
def test_a_ticket_comes_back_as_it_went(ticket: Ticket) -> None:
    """Through the bytes, not only through the message."""
    assert (
        ticket_from_wire(Message.FromString(ticket_to_wire(ticket).SerializeToString())) == ticket
    )


@no_deadline
@given(real(0, 1e6))
def test_a_float_is_rounded_once(temperature: float) -> None:
    """A client's double becomes 32 bits on the first hop and stays so on the others."""
    sampling = replace(TICKET.sampling, temperature=temperature / 3)
    once = ticket_from_wire(ticket_to_wire(replace(TICKET, sampling=sampling)))
    assert ticket_from_wire(ticket_to_wire(once)) == once


def corrupt(change: Callable[[Message], object]) -> Message:
    message = ticket_to_wire(TICKET)
    change(message)
    return message


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda m: m.ClearField("request_id"), "request_id is empty"),
        (lambda m: setattr(m, "order", 2**52), "order"),
        (lambda m: setattr(m, "root_hash", b"short"), "root_hash is not 16 bytes"),
        (lambda m: m.ClearField("prompt_token_ids"), "prompt_token_ids is empty"),
        (lambda m: m.ClearField("sampling"), "sampling is missing"),
        (lambda m: m.ClearField("sequences"), "sequences is empty"),
        (lambda m: m.sequences.append(m.sequences[0]), "indices are not ascending"),
        (lambda m: setattr(m.sequences[0], "index", 64), "a sequence has index 64"),
        (lambda m: setattr(m, "num_cached_tokens", 4), "num_cached_tokens"),
        (lambda m: setattr(m.sequences[0], "num_computed_tokens", 5), "is 5 of 4 tokens"),
        (lambda m: m.sequences[0].ClearField("block_ids"), "no blocks"),
        (lambda m: setattr(m.sampling, "max_tokens", 0), "max_tokens is 0"),
        (lambda m: setattr(m.sampling, "top_k", -1), "top_k is -1"),
        (lambda m: setattr(m.sampling, "logprobs", 21), "logprobs is 21"),
        (lambda m: m.sampling.structured_output.SetInParent(), "kind 0 is unknown"),
        (
            lambda m: m.sampling.structured_output.MergeFromString(
                StructuredOutput(
                    kind="STRUCTURE_KIND_JSON", text="x" * (MAX_STRUCTURE_BYTES + 1)
                ).SerializeToString()
            ),
            "structured_output has 262145 bytes, at most 262144",
        ),
    ],
)
def test_a_ticket_that_makes_no_sense_is_refused(
    change: Callable[[Message], object], problem: str
) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        ticket_from_wire(corrupt(change))


SWAPPED = replace(
    TICKET,
    sequences=(TicketSequence(0, (8,)),),
    swapped=Swapped("c-1", "h-1", 2, (SwappedTable(0, (3,)), SwappedTable(2, (3,)))),
)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda m: m.swapped.ClearField("pool_id"), "to nowhere"),
        (lambda m: m.swapped.ClearField("holder_id"), "holder_id is empty"),
        (lambda m: setattr(m.swapped, "holder_id", "x" * 300), "holder_id is too long"),
        (lambda m: setattr(m.swapped, "holder_epoch", 2**53), "holder_epoch"),
        (lambda m: setattr(m, "traceparent", "x" * 65), "traceparent is too long"),
        (lambda m: m.swapped.ClearField("tables"), "not all sequences were"),
        (lambda m: m.swapped.tables[1].ClearField("block_ids"), "a table is empty"),
        (lambda m: setattr(m.swapped.tables[0], "index", 2), "do not ascend"),
        (lambda m: m.swapped.tables.extend([m.swapped.tables[0]]), "do not ascend"),
        (
            lambda m: [m.swapped.tables.add(index=3 + i, block_ids=[1]) for i in range(63)],
            "65 tables",
        ),
        (lambda m: m.sequences[0].block_ids.append(1), "but with blocks"),
        (lambda m: m.sequences.add(index=1), "not all sequences were"),
    ],
)
def test_a_swapped_ticket_that_makes_no_sense_is_refused(
    change: Callable[[Message], object], problem: str
) -> None:
    message = ticket_to_wire(SWAPPED)
    change(message)
    with pytest.raises(InvalidRequest, match=problem):
        ticket_from_wire(message)


SEARCHING = replace(
    TICKET,
    sampling=replace(TICKET.sampling, beam=Beam(2)),
    sequences=(TicketSequence(0, (8,), (3,), 3), TicketSequence(1, (7,), (3,), 3)),
    beams=BeamState((-1.0, -2.5), (Hypothesis((9, 2), -0.5, FinishReason.STOP),)),
)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda m: setattr(m.sampling.beam, "width", 17), "1 of 17 beams"),
        (lambda m: setattr(m.sampling, "n", 0), "0 of 2 beams"),
        (lambda m: setattr(m.sampling, "n", 3), "3 of 2 beams"),
        (lambda m: setattr(m.sampling.beam, "length_penalty", -1e30), "penalty is -1e"),
        (lambda m: setattr(m.sampling.beam, "length_penalty", math.nan), "penalty is nan"),
        (lambda m: setattr(m.sampling.beam, "early_stopping", 9), "early_stopping 9"),
        (lambda m: m.sampling.ClearField("beam"), "1 finished of 0 beams"),
        (lambda m: m.ClearField("beams"), "beams is missing"),
        (lambda m: m.beams.scores.pop(), "sequences are not the beams"),
        (lambda m: m.beams.scores.reverse(), "scores do not fall"),
        (lambda m: m.beams.scores.__setitem__(1, float("-inf")), "not finite"),
        (lambda m: m.sequences[1].token_ids.append(1), "different lengths"),
        (lambda m: m.beams.finished.extend(m.beams.finished[:1] * 2), "3 finished of 2 beams"),
        (lambda m: m.beams.finished[0].ClearField("finish_reason"), "has not ended"),
        (lambda m: m.beams.finished[0].ClearField("token_ids"), "without tokens"),
        (lambda m: setattr(m.beams.finished[0], "score", float("nan")), "not finite"),
        (lambda m: setattr(m.beams.finished[0], "score", float("inf")), "not finite"),
        (lambda m: m.beams.finished[0].token_ids.extend([9] * 7), "a hypothesis of 9 tokens"),
    ],
)
def test_a_search_that_makes_no_sense_is_refused(
    change: Callable[[Message], object], problem: str
) -> None:
    message = ticket_to_wire(SEARCHING)
    change(message)
    with pytest.raises(InvalidRequest, match=problem):
        ticket_from_wire(message)


@no_deadline
@given(st.builds(Load, u32, u32, u32, u64, u32, u32, u32), st.booleans())
def test_loads_come_back(load: Load, draining: bool) -> None:
    message = WorkerLoad.FromString(load_to_wire(LoadReport(load, draining)).SerializeToString())
    assert load_from_wire(message) == LoadReport(load, draining)


@st.composite
def logprobs(draw: st.DrawFn) -> Logprobs:
    """-inf is the logarithm of 0."""
    value = real(-1e6, 0) | st.just(float("-inf"))
    top = sorted(draw(st.lists(value, max_size=20)), reverse=True)
    token_ids = draw(st.lists(u32, min_size=len(top), max_size=len(top)))
    return Logprobs(draw(value), draw(st.integers(1, 2**32 - 1)), tuple(token_ids), tuple(top))


@no_deadline
@given(logprobs())
def test_logprobs_come_back(logprobs: Logprobs) -> None:
    message = LogprobsMessage.FromString(LogprobsMessage(**to_fields(logprobs)).SerializeToString())
    assert from_wire(Logprobs, message) == logprobs
