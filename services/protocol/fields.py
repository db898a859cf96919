"""Copies dataclasses to messages field by field, for the codecs; checks received fields."""

from collections.abc import Iterable
from dataclasses import is_dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

from quire.v1 import prefill_pb2, sampling_pb2, worker_pb2
from services.model.structured.structure import StructureKind
from services.protocol.messages import PoolingMode, RequeueReason
from services.protocol.ticket import EarlyStopping, FinishReason, SamplingParams, Ticket
from services.runtime.errors import InvalidRequest

E = TypeVar("E", bound=Enum)


class WireEnum(Generic[E]):
    """An enum and its numbers in messages, where a member has the name `prefix` + its value in
    capitals."""

    def __init__(self, kind: type[E], wire: Any, prefix: str) -> None:
        self.numbers: dict[E, Any] = {
            member: wire.Value(prefix + member.value.upper()) for member in kind
        }
        self.members = {number: member for member, number in self.numbers.items()}

    def member(self, number: int, name: str) -> E:
        """Raises InvalidRequest, with the field's name, if the number is unknown."""
        require(number in self.members, f"{name} {number} is unknown")
        return self.members[number]


FINISH_REASONS = WireEnum(FinishReason, sampling_pb2.FinishReason, "FINISH_REASON_")
REQUEUE_REASONS = WireEnum(RequeueReason, worker_pb2.Requeue.Reason, "REASON_")
EARLY_STOPPING = WireEnum(EarlyStopping, sampling_pb2.EarlyStopping, "EARLY_STOPPING_")
STRUCTURE_KINDS = WireEnum(StructureKind, sampling_pb2.StructureKind, "STRUCTURE_KIND_")
POOLING_MODES = WireEnum(PoolingMode, prefill_pb2.Pooling.Mode, "MODE_")
_NUMBERS: dict[Any, int] = {
    **FINISH_REASONS.numbers,
    **REQUEUE_REASONS.numbers,
    **EARLY_STOPPING.numbers,
    **STRUCTURE_KINDS.numbers,
    **POOLING_MODES.numbers,
}


def to_fields(value: Any) -> dict[str, Any]:
    """The fields of a dataclass, as arguments for the message with fields of these names."""
    found = {name: _to_wire(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, Ticket):
        found["bad_words"] = [{"token_ids": word} for word in value.sampling.bad_words]
    if isinstance(value, SamplingParams):
        del found["bad_words"]  # the ticket has them
        found["logit_bias"] = dict(value.logit_bias)
        found["structured_output"] = found.pop("structure")
        if value.beam is not None:
            found["n"] = found["beam"].pop("num_returned")
    return found


def _to_wire(value: Any) -> Any:
    if isinstance(value, Enum):
        return _NUMBERS[value]
    if is_dataclass(value):
        return to_fields(value)
    if isinstance(value, tuple) and value and is_dataclass(value[0]):
        return list(map(to_fields, value))
    return value


def values(source: object, names: Iterable[str]) -> dict[str, Any]:
    """The named attributes of a dataclass or a message, as arguments for the other one."""
    return {name: getattr(source, name) for name in names}


def require(holds: bool, problem: str) -> None:
    """Raise InvalidRequest with `problem` unless the condition holds."""
    if not holds:
        raise InvalidRequest(f"malformed message: {problem}")
