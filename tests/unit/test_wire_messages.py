"""Commands and events on the wire: each comes back as it went."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, get_args

import pytest

from quire.types import Beam
from quire.v1 import prefill_pb2, sampling_pb2, worker_pb2
from quire.v1.decode_pb2 import DecodeConnectRequest, DecodeConnectResponse
from quire.v1.prefill_pb2 import PrefillConnectRequest, PrefillConnectResponse
from services.model.structured.structure import StructureKind
from services.protocol.command_codec import command_from_wire, command_to_wire
from services.protocol.event_codec import event_to_wire, events_from_wire
from services.protocol.fields import (
    EARLY_STOPPING,
    FINISH_REASONS,
    POOLING_MODES,
    REQUEUE_REASONS,
    STRUCTURE_KINDS,
    WireEnum,
)
from services.protocol.logprobs import LogprobColumns, Logprobs
from services.protocol.messages import (
    Abort,
    Admit,
    AwaitsBlocks,
    Began,
    Command,
    DrainNotice,
    Failed,
    Generated,
    HandOver,
    Pooling,
    PoolingMode,
    Prefilled,
    Requeued,
    RequeueReason,
    Reserve,
    Reserved,
    Resume,
    Step,
    Submit,
    WorkerEvent,
)
from services.protocol.ticket import (
    Adapter,
    BeamState,
    FinishReason,
    Hypothesis,
    SamplingParams,
    Swapped,
    SwappedTable,
    Ticket,
    TicketSequence,
)
from services.protocol.version import PROTOCOL_VERSION

SAMPLING = SamplingParams(temperature=0.5, top_k=4, top_p=0.75, min_p=0.25, seed=7, max_tokens=8)
TICKET = Ticket(
    request_id="r",
    attempt=2,
    order=3,
    pool_id="pool",
    holder_id="holder",
    holder_epoch=4,
    root_hash=bytes(range(16)),
    prompt_token_ids=(5, 6),
    sampling=SAMPLING,
    sequences=(TicketSequence(0, (10,), (11,), 3),),
    adapter=Adapter("name", "path", "digest"),
)
SEARCH = replace(
    TICKET,
    sampling=replace(SAMPLING, n=2, beam=Beam(3, 0.5, early_stopping=True)),
    beams=BeamState((-1.5,), (Hypothesis((16, 17), -2.5, FinishReason.LENGTH),)),
)
LOGPROBS = (Logprobs(-0.5, 2, (12, 13), (-0.25, -0.5)),)
SWAPPED = replace(
    TICKET,
    sequences=(TicketSequence(0, (10,)),),
    swapped=Swapped("swap", "holder", 5, (SwappedTable(0, (7,)),)),
)
OUTPUT = Generated("r", 2, 1, 3, (14, 15), FinishReason.STOP, LOGPROBS * 2, -0.75, 2, 1)
PREFILLED = Prefilled(TICKET.state, (OUTPUT,), LogprobColumns.of(LOGPROBS * 3))
COMMANDS: list[Command] = [
    Reserve("r", 2, 3),
    Submit(TICKET, 4),
    Submit(TICKET),
    Submit(TICKET, pooling=Pooling(PoolingMode.MEAN, 9)),
    Admit(TICKET),
    Admit(SEARCH),
    Abort("r", 2),
    Abort("r", 2, 0),
    HandOver("r", 2),
    Resume("r", 2, b"digest"),
]
EVENTS: list[WorkerEvent] = [
    AwaitsBlocks("r", 2, 3, 1),
    Began("r", 2, 16),
    PREFILLED,
    Prefilled(TICKET.state, (), None, (0.5, -0.5)),
    Reserved("r", 2, granted=True),
    Failed("r", 2, "code", "message"),
    *(Requeued("r", 2, reason, TICKET.state) for reason in RequeueReason),
    Requeued("r", 2, RequeueReason.DRAINING, SEARCH.state),
    Requeued("r", 2, RequeueReason.PREEMPTED, SWAPPED.state),
    DrainNotice(3),
    Step((OUTPUT,)),
]


def test_all_kinds_are_here() -> None:
    assert {type(each) for each in COMMANDS} == set(get_args(Command))
    assert {type(each) for each in EVENTS} == set(get_args(WorkerEvent))


@pytest.mark.parametrize("command", COMMANDS, ids=repr)
def test_a_command_comes_back_as_it_went(command: Command) -> None:
    kind: Any = PrefillConnectRequest if isinstance(command, Submit) else DecodeConnectRequest
    request = kind.FromString(kind(**command_to_wire(command)).SerializeToString())
    assert command_from_wire(request) == command


@pytest.mark.parametrize("event", EVENTS, ids=repr)
def test_an_event_comes_back_as_it_went(event: WorkerEvent) -> None:
    of_prefill = isinstance(event, Prefilled | AwaitsBlocks)
    kind: Any = PrefillConnectResponse if of_prefill else DecodeConnectResponse
    response = kind.FromString(kind(**event_to_wire(event)).SerializeToString())
    expected = list(event.outputs) if isinstance(event, Step) else [event]
    assert list(events_from_wire(response)) == expected


@pytest.mark.parametrize("num_top", [0, 1, 3])
def test_logprobs_of_a_prompt_come_back_in_their_order(num_top: int) -> None:
    """A peer of the version before sends and reads a message for each token."""
    rows = [
        Logprobs(-float(n), n, tuple(range(n, n + num_top)), (-0.5 * n,) * num_top)
        for n in range(1, 5)
    ]
    event = replace(PREFILLED, prompt_logprobs=LogprobColumns.of(rows))
    kind: Any = PrefillConnectResponse
    for version in (PROTOCOL_VERSION, PROTOCOL_VERSION - 1):
        response = kind(**event_to_wire(event, version))
        assert len(response.prefilled.prompt_logprobs) == (0 if version == PROTOCOL_VERSION else 4)
        (found,) = events_from_wire(response)
        assert found == event
        assert isinstance(found, Prefilled)
        assert found.prompt_logprobs is not None
        assert list(found.prompt_logprobs.rows()) == rows


@pytest.mark.parametrize(
    ("kind", "numbers", "wire", "prefix"),
    [
        (FinishReason, FINISH_REASONS, sampling_pb2, "FINISH_REASON_"),
        (RequeueReason, REQUEUE_REASONS, worker_pb2.Requeue, "REASON_"),
        ((False, True, "never"), EARLY_STOPPING, sampling_pb2, "EARLY_STOPPING_"),
        (StructureKind, STRUCTURE_KINDS, sampling_pb2, "STRUCTURE_KIND_"),
        (PoolingMode, POOLING_MODES, prefill_pb2.Pooling, "MODE_"),
    ],
)
def test_members_have_the_number_of_their_name(
    kind: Iterable[Any], numbers: WireEnum[Any], wire: Any, prefix: str
) -> None:
    """Clients and services of another version see the numbers."""
    for member in kind:
        number = getattr(wire, f"{prefix}{getattr(member, 'value', member)}".upper())
        assert (numbers.numbers[member], numbers.members[number]) == (number, member)
