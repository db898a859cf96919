from quire.v1 import logprobs_pb2 as _logprobs_pb2
from quire.v1 import sampling_pb2 as _sampling_pb2
from quire.v1 import ticket_pb2 as _ticket_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Hello(_message.Message):
    __slots__ = ("peer_id", "protocol_version", "function_library")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_LIBRARY_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    protocol_version: int
    function_library: str
    def __init__(self, peer_id: _Optional[str] = ..., protocol_version: _Optional[int] = ..., function_library: _Optional[str] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("worker_id", "protocol_version", "function_library", "pool_id", "load")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_LIBRARY_FIELD_NUMBER: _ClassVar[int]
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    protocol_version: int
    function_library: str
    pool_id: str
    load: WorkerLoad
    def __init__(self, worker_id: _Optional[str] = ..., protocol_version: _Optional[int] = ..., function_library: _Optional[str] = ..., pool_id: _Optional[str] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("num_running", "num_waiting", "num_free_slots", "num_pending_tokens", "draining", "busy_permille", "step_us", "tokens_per_s")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_PENDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    BUSY_PERMILLE_FIELD_NUMBER: _ClassVar[int]
    STEP_US_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    num_free_slots: int
    num_pending_tokens: int
    draining: bool
    busy_permille: int
    step_us: int
    tokens_per_s: int
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_free_slots: _Optional[int] = ..., num_pending_tokens: _Optional[int] = ..., draining: _Optional[bool] = ..., busy_permille: _Optional[int] = ..., step_us: _Optional[int] = ..., tokens_per_s: _Optional[int] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("request_id", "attempt", "index")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    index: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., index: _Optional[int] = ...) -> None: ...

class SequenceOutput(_message.Message):
    __slots__ = ("request_id", "attempt", "index", "token_ids", "finish_reason", "position", "logprobs", "score", "num_drafts", "num_accepted")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: _sampling_pb2.FinishReason
    position: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_logprobs_pb2.Logprobs]
    score: float
    num_drafts: int
    num_accepted: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[_sampling_pb2.FinishReason, str]] = ..., position: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_logprobs_pb2.Logprobs, _Mapping]]] = ..., score: _Optional[float] = ..., num_drafts: _Optional[int] = ..., num_accepted: _Optional[int] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("next_role",)
    NEXT_ROLE_FIELD_NUMBER: _ClassVar[int]
    next_role: str
    def __init__(self, next_role: _Optional[str] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ("num_running", "has_new_weights")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    HAS_NEW_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    has_new_weights: bool
    def __init__(self, num_running: _Optional[int] = ..., has_new_weights: _Optional[bool] = ...) -> None: ...

class Reload(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RequestFailed(_message.Message):
    __slots__ = ("request_id", "attempt", "code", "message")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    code: str
    message: str
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Began(_message.Message):
    __slots__ = ("request_id", "attempt", "num_cached_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    num_cached_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class Requeue(_message.Message):
    __slots__ = ("ticket", "reason")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REASON_UNSPECIFIED: _ClassVar[Requeue.Reason]
        REASON_PREEMPTED: _ClassVar[Requeue.Reason]
        REASON_DRAINING: _ClassVar[Requeue.Reason]
        REASON_STALE_TICKET: _ClassVar[Requeue.Reason]
        REASON_HANDED_OVER: _ClassVar[Requeue.Reason]
    REASON_UNSPECIFIED: Requeue.Reason
    REASON_PREEMPTED: Requeue.Reason
    REASON_DRAINING: Requeue.Reason
    REASON_STALE_TICKET: Requeue.Reason
    REASON_HANDED_OVER: Requeue.Reason
    TICKET_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ticket: _ticket_pb2.TicketState
    reason: Requeue.Reason
    def __init__(self, ticket: _Optional[_Union[_ticket_pb2.TicketState, _Mapping]] = ..., reason: _Optional[_Union[Requeue.Reason, str]] = ...) -> None: ...
