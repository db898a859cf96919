from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class ScaleRequest(_message.Message):
    __slots__ = ("num_prefill", "num_decode")
    NUM_PREFILL_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_FIELD_NUMBER: _ClassVar[int]
    num_prefill: int
    num_decode: int
    def __init__(self, num_prefill: _Optional[int] = ..., num_decode: _Optional[int] = ...) -> None: ...

class ScaleResponse(_message.Message):
    __slots__ = ("num_prefill", "num_decode", "starting", "leaving")
    NUM_PREFILL_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_FIELD_NUMBER: _ClassVar[int]
    STARTING_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    num_prefill: int
    num_decode: int
    starting: _containers.RepeatedScalarFieldContainer[str]
    leaving: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, num_prefill: _Optional[int] = ..., num_decode: _Optional[int] = ..., starting: _Optional[_Iterable[str]] = ..., leaving: _Optional[_Iterable[str]] = ...) -> None: ...
