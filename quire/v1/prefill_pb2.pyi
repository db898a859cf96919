from quire.v1 import logprobs_pb2 as _logprobs_pb2
from quire.v1 import ticket_pb2 as _ticket_pb2
from quire.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillConnectRequest(_message.Message):
    __slots__ = ("hello", "submit", "abort", "drain", "reload", "more")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    RELOAD_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    hello: _worker_pb2.Hello
    submit: PrefillSubmit
    abort: _worker_pb2.Abort
    drain: _worker_pb2.Drain
    reload: _worker_pb2.Reload
    more: _containers.RepeatedCompositeFieldContainer[PrefillConnectRequest]
    def __init__(self, hello: _Optional[_Union[_worker_pb2.Hello, _Mapping]] = ..., submit: _Optional[_Union[PrefillSubmit, _Mapping]] = ..., abort: _Optional[_Union[_worker_pb2.Abort, _Mapping]] = ..., drain: _Optional[_Union[_worker_pb2.Drain, _Mapping]] = ..., reload: _Optional[_Union[_worker_pb2.Reload, _Mapping]] = ..., more: _Optional[_Iterable[_Union[PrefillConnectRequest, _Mapping]]] = ...) -> None: ...

class PrefillConnectResponse(_message.Message):
    __slots__ = ("welcome", "prefilled", "failed", "requeue", "draining", "load", "began", "awaits_blocks", "more")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    REQUEUE_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    BEGAN_FIELD_NUMBER: _ClassVar[int]
    AWAITS_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    welcome: _worker_pb2.Welcome
    prefilled: Prefilled
    failed: _worker_pb2.RequestFailed
    requeue: _worker_pb2.Requeue
    draining: _worker_pb2.Draining
    load: _worker_pb2.WorkerLoad
    began: _worker_pb2.Began
    awaits_blocks: AwaitsBlocks
    more: _containers.RepeatedCompositeFieldContainer[PrefillConnectResponse]
    def __init__(self, welcome: _Optional[_Union[_worker_pb2.Welcome, _Mapping]] = ..., prefilled: _Optional[_Union[Prefilled, _Mapping]] = ..., failed: _Optional[_Union[_worker_pb2.RequestFailed, _Mapping]] = ..., requeue: _Optional[_Union[_worker_pb2.Requeue, _Mapping]] = ..., draining: _Optional[_Union[_worker_pb2.Draining, _Mapping]] = ..., load: _Optional[_Union[_worker_pb2.WorkerLoad, _Mapping]] = ..., began: _Optional[_Union[_worker_pb2.Began, _Mapping]] = ..., awaits_blocks: _Optional[_Union[AwaitsBlocks, _Mapping]] = ..., more: _Optional[_Iterable[_Union[PrefillConnectResponse, _Mapping]]] = ...) -> None: ...

class AwaitsBlocks(_message.Message):
    __slots__ = ("request_id", "attempt", "num_needed", "num_available")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NUM_NEEDED_FIELD_NUMBER: _ClassVar[int]
    NUM_AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    num_needed: int
    num_available: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., num_needed: _Optional[int] = ..., num_available: _Optional[int] = ...) -> None: ...

class PrefillSubmit(_message.Message):
    __slots__ = ("ticket", "prompt_logprobs", "pooling")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    ticket: _ticket_pb2.Ticket
    prompt_logprobs: int
    pooling: Pooling
    def __init__(self, ticket: _Optional[_Union[_ticket_pb2.Ticket, _Mapping]] = ..., prompt_logprobs: _Optional[int] = ..., pooling: _Optional[_Union[Pooling, _Mapping]] = ...) -> None: ...

class Pooling(_message.Message):
    __slots__ = ("mode", "dimensions")
    class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        MODE_UNSPECIFIED: _ClassVar[Pooling.Mode]
        MODE_LAST: _ClassVar[Pooling.Mode]
        MODE_MEAN: _ClassVar[Pooling.Mode]
    MODE_UNSPECIFIED: Pooling.Mode
    MODE_LAST: Pooling.Mode
    MODE_MEAN: Pooling.Mode
    MODE_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    mode: Pooling.Mode
    dimensions: int
    def __init__(self, mode: _Optional[_Union[Pooling.Mode, str]] = ..., dimensions: _Optional[int] = ...) -> None: ...

class Prefilled(_message.Message):
    __slots__ = ("ticket", "outputs", "prompt_logprobs", "embedding", "prompt_logprob_columns")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROB_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    ticket: _ticket_pb2.TicketState
    outputs: _containers.RepeatedCompositeFieldContainer[_worker_pb2.SequenceOutput]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_logprobs_pb2.Logprobs]
    embedding: _containers.RepeatedScalarFieldContainer[float]
    prompt_logprob_columns: _logprobs_pb2.LogprobColumns
    def __init__(self, ticket: _Optional[_Union[_ticket_pb2.TicketState, _Mapping]] = ..., outputs: _Optional[_Iterable[_Union[_worker_pb2.SequenceOutput, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_logprobs_pb2.Logprobs, _Mapping]]] = ..., embedding: _Optional[_Iterable[float]] = ..., prompt_logprob_columns: _Optional[_Union[_logprobs_pb2.LogprobColumns, _Mapping]] = ...) -> None: ...
