"""Copies dataclasses to messages and back, field by field, for the codecs; checks what came."""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, Generic, TypeVar, cast, get_args, get_origin, get_type_hints

from quire.sampling import Beam, EarlyStopping
from quire.v1 import prefill_pb2, sampling_pb2, worker_pb2
from services.model.structured.structure import StructureKind
from services.protocol.messages import PoolingMode, RequeueReason
from services.protocol.ticket import FinishReason, SamplingParams, Ticket
from services.runtime.errors import InvalidRequest

D = TypeVar("D")
E = TypeVar("E", bound=Hashable)

Read = Callable[[Any], Any]
"""Reads the value of one field from a message."""


class WireEnum(Generic[E]):
    """The members of an enum, or other values, and their numbers in messages, where a member has
    the name `prefix` + its value in capitals."""

    def __init__(self, kind: Iterable[E], wire: Any, prefix: str) -> None:
        self.numbers: dict[E, Any] = {
            member: wire.Value(prefix + str(getattr(member, "value", member)).upper())
            for member in kind
        }
        self.members = {number: member for member, number in self.numbers.items()}

    def member(self, number: int, name: str) -> E:
        """Raises InvalidRequest, with the field's name, if the number is unknown."""
        require(number in self.members, f"{name} {number} is unknown")
        return self.members[number]


FINISH_REASONS = WireEnum(FinishReason, sampling_pb2.FinishReason, "FINISH_REASON_")
REQUEUE_REASONS = WireEnum(RequeueReason, worker_pb2.Requeue.Reason, "REASON_")
EARLY_STOPPING = WireEnum[EarlyStopping](
    (False, True, "never"), sampling_pb2.EarlyStopping, "EARLY_STOPPING_"
)
EARLY_STOPPING.members[sampling_pb2.EARLY_STOPPING_UNSPECIFIED] = False
STRUCTURE_KINDS = WireEnum(StructureKind, sampling_pb2.StructureKind, "STRUCTURE_KIND_")
POOLING_MODES = WireEnum(PoolingMode, prefill_pb2.Pooling.Mode, "MODE_")
_ENUMS: dict[Any, WireEnum[Any]] = {
    FinishReason: FINISH_REASONS,
    RequeueReason: REQUEUE_REASONS,
    EarlyStopping: EARLY_STOPPING,
    StructureKind: STRUCTURE_KINDS,
    PoolingMode: POOLING_MODES,
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
    if isinstance(value, Beam):
        found["early_stopping"] = EARLY_STOPPING.numbers[value.early_stopping]
    return found


def _to_wire(value: Any) -> Any:
    if isinstance(value, Enum):
        return _ENUMS[type(value)].numbers[value]
    if is_dataclass(value):
        return to_fields(value)
    if isinstance(value, tuple) and value and is_dataclass(value[0]):
        return list(map(to_fields, value))
    return value


def from_wire(kind: type[D], message: Any, **converted: object) -> D:
    """The dataclass of a message that has fields of these names; `converted` are its other fields.
    A field that the message does not have is None where the dataclass allows it. Raises
    InvalidRequest if the number of an enum is unknown."""
    readers = _readers(cast(Hashable, kind)).items()
    return kind(
        **{name: read(message) for name, read in readers if name not in converted}, **converted
    )


@cache
def _readers(kind: Any) -> dict[str, Read]:
    hints = get_type_hints(kind)
    return {field.name: _reader(field.name, hints[field.name]) for field in fields(kind)}


def _reader(name: str, hint: Any) -> Read:
    """Return the function that reads a field of this type."""
    get = attrgetter(name)
    if hint in _ENUMS:
        return lambda message: _ENUMS[hint].member(get(message), name)
    if isinstance(hint, UnionType):
        (given,) = (each for each in get_args(hint) if each is not NoneType)
        read, is_enum = _reader(name, given), given in _ENUMS
        return lambda message: (
            read(message) if (get(message) if is_enum else message.HasField(name)) else None
        )
    if get_origin(hint) is tuple:
        item = get_args(hint)[0]
        if isinstance(item, type) and is_dataclass(item):
            return lambda message: tuple(from_wire(item, each) for each in get(message))
        return lambda message: tuple(get(message))
    if isinstance(hint, type) and is_dataclass(hint):
        return lambda message: from_wire(hint, get(message))
    return get


def values(source: object, names: Iterable[str]) -> dict[str, Any]:
    """The named attributes of a dataclass or a message, as arguments for the other one."""
    return {name: getattr(source, name) for name in names}


def require(holds: bool, problem: str) -> None:
    """Raise InvalidRequest with `problem` unless the condition holds."""
    if not holds:
        raise InvalidRequest(f"malformed message: {problem}")
