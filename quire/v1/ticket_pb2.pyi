from quire.v1 import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Ticket(_message.Message):
    __slots__ = ("request_id", "attempt", "order", "pool_id", "holder_id", "holder_epoch", "root_hash", "prompt_token_ids", "sampling", "sequences", "num_cached_tokens", "timeout_ms", "swapped", "prefill_ns_per_token", "traceparent", "adapter", "bad_words", "beams")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    HOLDER_ID_FIELD_NUMBER: _ClassVar[int]
    HOLDER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROOT_HASH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    BEAMS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    order: int
    pool_id: str
    holder_id: str
    holder_epoch: int
    root_hash: bytes
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _sampling_pb2.SamplingParams
    sequences: _containers.RepeatedCompositeFieldContainer[TicketSequence]
    num_cached_tokens: int
    timeout_ms: int
    swapped: Swapped
    prefill_ns_per_token: int
    traceparent: str
    adapter: Adapter
    bad_words: _containers.RepeatedCompositeFieldContainer[BadWord]
    beams: BeamState
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., order: _Optional[int] = ..., pool_id: _Optional[str] = ..., holder_id: _Optional[str] = ..., holder_epoch: _Optional[int] = ..., root_hash: _Optional[bytes] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., sequences: _Optional[_Iterable[_Union[TicketSequence, _Mapping]]] = ..., num_cached_tokens: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., swapped: _Optional[_Union[Swapped, _Mapping]] = ..., prefill_ns_per_token: _Optional[int] = ..., traceparent: _Optional[str] = ..., adapter: _Optional[_Union[Adapter, _Mapping]] = ..., bad_words: _Optional[_Iterable[_Union[BadWord, _Mapping]]] = ..., beams: _Optional[_Union[BeamState, _Mapping]] = ...) -> None: ...

class TicketState(_message.Message):
    __slots__ = ("request_id", "attempt", "order", "holder_id", "holder_epoch", "sequences", "num_cached_tokens", "swapped", "prefill_ns_per_token", "beams")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    HOLDER_ID_FIELD_NUMBER: _ClassVar[int]
    HOLDER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    BEAMS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    order: int
    holder_id: str
    holder_epoch: int
    sequences: _containers.RepeatedCompositeFieldContainer[TicketSequence]
    num_cached_tokens: int
    swapped: Swapped
    prefill_ns_per_token: int
    beams: BeamState
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., order: _Optional[int] = ..., holder_id: _Optional[str] = ..., holder_epoch: _Optional[int] = ..., sequences: _Optional[_Iterable[_Union[TicketSequence, _Mapping]]] = ..., num_cached_tokens: _Optional[int] = ..., swapped: _Optional[_Union[Swapped, _Mapping]] = ..., prefill_ns_per_token: _Optional[int] = ..., beams: _Optional[_Union[BeamState, _Mapping]] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "path", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    digest: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class Swapped(_message.Message):
    __slots__ = ("pool_id", "holder_id", "holder_epoch", "tables")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    HOLDER_ID_FIELD_NUMBER: _ClassVar[int]
    HOLDER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    holder_id: str
    holder_epoch: int
    tables: _containers.RepeatedCompositeFieldContainer[SwappedTable]
    def __init__(self, pool_id: _Optional[str] = ..., holder_id: _Optional[str] = ..., holder_epoch: _Optional[int] = ..., tables: _Optional[_Iterable[_Union[SwappedTable, _Mapping]]] = ...) -> None: ...

class SwappedTable(_message.Message):
    __slots__ = ("index", "block_ids")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    index: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, index: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class BadWord(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class BeamState(_message.Message):
    __slots__ = ("scores", "finished")
    SCORES_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    scores: _containers.RepeatedScalarFieldContainer[float]
    finished: _containers.RepeatedCompositeFieldContainer[Hypothesis]
    def __init__(self, scores: _Optional[_Iterable[float]] = ..., finished: _Optional[_Iterable[_Union[Hypothesis, _Mapping]]] = ...) -> None: ...

class Hypothesis(_message.Message):
    __slots__ = ("token_ids", "score", "finish_reason")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    score: float
    finish_reason: _sampling_pb2.FinishReason
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., score: _Optional[float] = ..., finish_reason: _Optional[_Union[_sampling_pb2.FinishReason, str]] = ...) -> None: ...

class TicketSequence(_message.Message):
    __slots__ = ("index", "token_ids", "block_ids", "num_computed_tokens")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    num_computed_tokens: int
    def __init__(self, index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., block_ids: _Optional[_Iterable[int]] = ..., num_computed_tokens: _Optional[int] = ...) -> None: ...
