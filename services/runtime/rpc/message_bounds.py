"""Limits the number of fields and values of a protobuf message, before the message is decoded.

Two bytes of a message can become an object of 50 bytes. The check stops at the first field above
the limit, so its own work is bounded too.
"""

from functools import cache
from typing import cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from services.runtime.errors import InvalidRequest

SMALL_BYTES = 1 << 16
"""A message up to this size needs no check: it always decodes within a millisecond."""
MAX_FIELDS = 1 << 16
"""Limit over all depths. Each item of a repeated field counts as a field, unless it is packed."""
MAX_PACKED_VALUES = 3 << 18

_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BITS = 70
_CONTINUED = bytes(range(128, 256))
"""The bytes of a varint other than its last one."""


def check_counts(data: bytes, message: type[Message]) -> None:
    """Raises InvalidRequest if `data` has too many fields or values, DecodeError if it is not a
    protobuf message."""
    try:
        _walk(data, cast("Descriptor", message.DESCRIPTOR))
    except IndexError as error:
        raise DecodeError("truncated") from error


def _walk(data: bytes, message: Descriptor) -> None:
    num_fields = num_values = 0
    todo = [(0, len(data), message)]
    while todo:
        position, end, kind = todo.pop()
        children = _length_delimited(kind)
        while position < end:
            num_fields += 1
            if num_fields > MAX_FIELDS:
                raise InvalidRequest(f"the message has more than {MAX_FIELDS} fields")
            tag, position = _varint(data, position)
            if tag & 7 == _LENGTH_DELIMITED:
                size, begin = _varint(data, position)
                position = begin + size
                child = children.get(tag >> 3)
                if child is not None:
                    todo.append((begin, position, child))
                elif tag >> 3 in children:
                    num_values += len(data[begin:position].translate(None, _CONTINUED))
            else:
                position = _skip(data, position, tag & 7)
        if position != end:
            raise DecodeError("a field is longer than its message")
        if num_values > MAX_PACKED_VALUES:
            raise InvalidRequest(
                f"the message has {num_values} values, at most {MAX_PACKED_VALUES}"
            )


def _skip(data: bytes, position: int, wire_type: int) -> int:
    if wire_type == _VARINT:
        return _varint(data, position)[1]
    if wire_type not in (_FIXED32, _FIXED64):
        raise DecodeError(f"wire type {wire_type}")
    return position + (4 if wire_type == _FIXED32 else 8)


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """The value at `position`, and the position behind it. Raises IndexError for truncated data."""
    value = shift = 0
    while (byte := data[position]) >= 128:
        value |= (byte & 127) << shift
        shift += 7
        position += 1
        if shift >= _MAX_VARINT_BITS:
            raise DecodeError("a number of more than 64 bits")
    return value | byte << shift, position + 1


@cache
def _length_delimited(message: Descriptor) -> dict[int, Descriptor | None]:
    """The fields that may contain many values, by number: messages with their descriptors, and
    fields of packed numbers with None."""
    texts = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
    return {field.number: field.message_type for field in message.fields if field.type not in texts}
