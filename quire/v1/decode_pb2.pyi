from quire.v1 import ticket_pb2 as _ticket_pb2
from quire.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DecodeConnectRequest(_message.Message):
    __slots__ = ("hello", "reserve", "admit", "abort", "drain", "hand_over", "resume", "reload", "more")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    ADMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    HAND_OVER_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    RELOAD_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    hello: _worker_pb2.Hello
    reserve: Reserve
    admit: Admit
    abort: _worker_pb2.Abort
    drain: _worker_pb2.Drain
    hand_over: HandOver
    resume: Resume
    reload: _worker_pb2.Reload
    more: _containers.RepeatedCompositeFieldContainer[DecodeConnectRequest]
    def __init__(self, hello: _Optional[_Union[_worker_pb2.Hello, _Mapping]] = ..., reserve: _Optional[_Union[Reserve, _Mapping]] = ..., admit: _Optional[_Union[Admit, _Mapping]] = ..., abort: _Optional[_Union[_worker_pb2.Abort, _Mapping]] = ..., drain: _Optional[_Union[_worker_pb2.Drain, _Mapping]] = ..., hand_over: _Optional[_Union[HandOver, _Mapping]] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., reload: _Optional[_Union[_worker_pb2.Reload, _Mapping]] = ..., more: _Optional[_Iterable[_Union[DecodeConnectRequest, _Mapping]]] = ...) -> None: ...

class DecodeConnectResponse(_message.Message):
    __slots__ = ("welcome", "reserved", "step", "failed", "requeue", "draining", "load", "began", "more")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    REQUEUE_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    BEGAN_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    welcome: _worker_pb2.Welcome
    reserved: Reserved
    step: StepOutput
    failed: _worker_pb2.RequestFailed
    requeue: _worker_pb2.Requeue
    draining: _worker_pb2.Draining
    load: _worker_pb2.WorkerLoad
    began: _worker_pb2.Began
    more: _containers.RepeatedCompositeFieldContainer[DecodeConnectResponse]
    def __init__(self, welcome: _Optional[_Union[_worker_pb2.Welcome, _Mapping]] = ..., reserved: _Optional[_Union[Reserved, _Mapping]] = ..., step: _Optional[_Union[StepOutput, _Mapping]] = ..., failed: _Optional[_Union[_worker_pb2.RequestFailed, _Mapping]] = ..., requeue: _Optional[_Union[_worker_pb2.Requeue, _Mapping]] = ..., draining: _Optional[_Union[_worker_pb2.Draining, _Mapping]] = ..., load: _Optional[_Union[_worker_pb2.WorkerLoad, _Mapping]] = ..., began: _Optional[_Union[_worker_pb2.Began, _Mapping]] = ..., more: _Optional[_Iterable[_Union[DecodeConnectResponse, _Mapping]]] = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ("request_id", "attempt", "num_sequences")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    num_sequences: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., num_sequences: _Optional[int] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("request_id", "attempt", "granted")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    granted: bool
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., granted: _Optional[bool] = ...) -> None: ...

class Admit(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: _ticket_pb2.Ticket
    def __init__(self, ticket: _Optional[_Union[_ticket_pb2.Ticket, _Mapping]] = ...) -> None: ...

class HandOver(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("request_id", "attempt", "digest")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    digest: bytes
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class StepOutput(_message.Message):
    __slots__ = ("outputs",)
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[_worker_pb2.SequenceOutput]
    def __init__(self, outputs: _Optional[_Iterable[_Union[_worker_pb2.SequenceOutput, _Mapping]]] = ...) -> None: ...
