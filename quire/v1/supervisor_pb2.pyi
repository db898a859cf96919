from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class ScaleRequest(_message.Message):
    __slots__ = ("num_prefill", "num_decode", "model")
    NUM_PREFILL_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    num_prefill: int
    num_decode: int
    model: str
    def __init__(self, num_prefill: _Optional[int] = ..., num_decode: _Optional[int] = ..., model: _Optional[str] = ...) -> None: ...

class ScaleResponse(_message.Message):
    __slots__ = ("num_prefill", "num_decode", "starting", "leaving", "failing", "warning", "changing")
    class FailingEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class ChangingEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NUM_PREFILL_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_FIELD_NUMBER: _ClassVar[int]
    STARTING_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    FAILING_FIELD_NUMBER: _ClassVar[int]
    WARNING_FIELD_NUMBER: _ClassVar[int]
    CHANGING_FIELD_NUMBER: _ClassVar[int]
    num_prefill: int
    num_decode: int
    starting: _containers.RepeatedScalarFieldContainer[str]
    leaving: _containers.RepeatedScalarFieldContainer[str]
    failing: _containers.ScalarMap[str, str]
    warning: str
    changing: _containers.ScalarMap[str, str]
    def __init__(self, num_prefill: _Optional[int] = ..., num_decode: _Optional[int] = ..., starting: _Optional[_Iterable[str]] = ..., leaving: _Optional[_Iterable[str]] = ..., failing: _Optional[_Mapping[str, str]] = ..., warning: _Optional[str] = ..., changing: _Optional[_Mapping[str, str]] = ...) -> None: ...

class UpgradeRequest(_message.Message):
    __slots__ = ("begin",)
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    begin: bool
    def __init__(self, begin: _Optional[bool] = ...) -> None: ...

class UpgradeResponse(_message.Message):
    __slots__ = ("steps", "is_running", "failure")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    IS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedScalarFieldContainer[str]
    is_running: bool
    failure: str
    def __init__(self, steps: _Optional[_Iterable[str]] = ..., is_running: _Optional[bool] = ..., failure: _Optional[str] = ...) -> None: ...
