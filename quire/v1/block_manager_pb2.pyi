from quire.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_STARTING: _ClassVar[WorkerState]
    WORKER_STATE_SERVING: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]
    WORKER_STATE_FENCED: _ClassVar[WorkerState]
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_STARTING: WorkerState
WORKER_STATE_SERVING: WorkerState
WORKER_STATE_DRAINING: WorkerState
WORKER_STATE_FENCED: WorkerState

class ListPoolsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListPoolsResponse(_message.Message):
    __slots__ = ("pools",)
    POOLS_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedCompositeFieldContainer[Pool]
    def __init__(self, pools: _Optional[_Iterable[_Union[Pool, _Mapping]]] = ...) -> None: ...

class Pool(_message.Message):
    __slots__ = ("pool_id", "model", "fingerprint", "block_size", "block_bytes", "num_blocks", "num_free", "num_cached", "num_held", "num_holders", "num_waiters", "worker_ids", "num_prefix_queries", "num_prefix_hits", "recovering", "missing_worker_ids", "num_retained", "shares")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_FIELD_NUMBER: _ClassVar[int]
    NUM_HOLDERS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITERS_FIELD_NUMBER: _ClassVar[int]
    WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_QUERIES_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_HITS_FIELD_NUMBER: _ClassVar[int]
    RECOVERING_FIELD_NUMBER: _ClassVar[int]
    MISSING_WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_RETAINED_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    model: str
    fingerprint: str
    block_size: int
    block_bytes: int
    num_blocks: int
    num_free: int
    num_cached: int
    num_held: int
    num_holders: int
    num_waiters: int
    worker_ids: _containers.RepeatedScalarFieldContainer[str]
    num_prefix_queries: int
    num_prefix_hits: int
    recovering: bool
    missing_worker_ids: _containers.RepeatedScalarFieldContainer[str]
    num_retained: int
    shares: _containers.RepeatedCompositeFieldContainer[PoolShare]
    def __init__(self, pool_id: _Optional[str] = ..., model: _Optional[str] = ..., fingerprint: _Optional[str] = ..., block_size: _Optional[int] = ..., block_bytes: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_free: _Optional[int] = ..., num_cached: _Optional[int] = ..., num_held: _Optional[int] = ..., num_holders: _Optional[int] = ..., num_waiters: _Optional[int] = ..., worker_ids: _Optional[_Iterable[str]] = ..., num_prefix_queries: _Optional[int] = ..., num_prefix_hits: _Optional[int] = ..., recovering: _Optional[bool] = ..., missing_worker_ids: _Optional[_Iterable[str]] = ..., num_retained: _Optional[int] = ..., shares: _Optional[_Iterable[_Union[PoolShare, _Mapping]]] = ...) -> None: ...

class PoolShare(_message.Message):
    __slots__ = ("tenant", "num_blocks", "block_ms")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_MS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    num_blocks: int
    block_ms: int
    def __init__(self, tenant: _Optional[str] = ..., num_blocks: _Optional[int] = ..., block_ms: _Optional[int] = ...) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    def __init__(self, workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ...) -> None: ...

class Worker(_message.Message):
    __slots__ = ("worker_id", "role", "address", "pool_id", "model", "state", "load", "engine", "started_unix_ms", "pid")
    class EngineEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    STARTED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: str
    address: str
    pool_id: str
    model: str
    state: WorkerState
    load: _worker_pb2.WorkerLoad
    engine: _containers.ScalarMap[str, str]
    started_unix_ms: int
    pid: int
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[str] = ..., address: _Optional[str] = ..., pool_id: _Optional[str] = ..., model: _Optional[str] = ..., state: _Optional[_Union[WorkerState, str]] = ..., load: _Optional[_Union[_worker_pb2.WorkerLoad, _Mapping]] = ..., engine: _Optional[_Mapping[str, str]] = ..., started_unix_ms: _Optional[int] = ..., pid: _Optional[int] = ...) -> None: ...

class Holder(_message.Message):
    __slots__ = ("pool_id", "holder_id", "epoch", "worker_id", "order", "num_blocks")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    HOLDER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    holder_id: str
    epoch: int
    worker_id: str
    order: int
    num_blocks: int
    def __init__(self, pool_id: _Optional[str] = ..., holder_id: _Optional[str] = ..., epoch: _Optional[int] = ..., worker_id: _Optional[str] = ..., order: _Optional[int] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class AuditRequest(_message.Message):
    __slots__ = ("pool_id",)
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    def __init__(self, pool_id: _Optional[str] = ...) -> None: ...

class AuditResponse(_message.Message):
    __slots__ = ("pools",)
    POOLS_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedCompositeFieldContainer[PoolAudit]
    def __init__(self, pools: _Optional[_Iterable[_Union[PoolAudit, _Mapping]]] = ...) -> None: ...

class PoolAudit(_message.Message):
    __slots__ = ("pool_id", "num_blocks", "num_free", "num_cached", "num_held", "num_holders", "num_references", "ledger_checked", "violations", "recovering")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_FIELD_NUMBER: _ClassVar[int]
    NUM_HOLDERS_FIELD_NUMBER: _ClassVar[int]
    NUM_REFERENCES_FIELD_NUMBER: _ClassVar[int]
    LEDGER_CHECKED_FIELD_NUMBER: _ClassVar[int]
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    RECOVERING_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    num_blocks: int
    num_free: int
    num_cached: int
    num_held: int
    num_holders: int
    num_references: int
    ledger_checked: bool
    violations: _containers.RepeatedScalarFieldContainer[str]
    recovering: bool
    def __init__(self, pool_id: _Optional[str] = ..., num_blocks: _Optional[int] = ..., num_free: _Optional[int] = ..., num_cached: _Optional[int] = ..., num_held: _Optional[int] = ..., num_holders: _Optional[int] = ..., num_references: _Optional[int] = ..., ledger_checked: _Optional[bool] = ..., violations: _Optional[_Iterable[str]] = ..., recovering: _Optional[bool] = ...) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "force", "next_role")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    NEXT_ROLE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    force: bool
    next_role: str
    def __init__(self, worker_id: _Optional[str] = ..., force: _Optional[bool] = ..., next_role: _Optional[str] = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ("num_running",)
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    def __init__(self, num_running: _Optional[int] = ...) -> None: ...

class ReloadRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class ReloadResponse(_message.Message):
    __slots__ = ("worker_ids",)
    WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    worker_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class WatchBlocksRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchBlocksResponse(_message.Message):
    __slots__ = ("maps",)
    MAPS_FIELD_NUMBER: _ClassVar[int]
    maps: _containers.RepeatedCompositeFieldContainer[BlockMap]
    def __init__(self, maps: _Optional[_Iterable[_Union[BlockMap, _Mapping]]] = ...) -> None: ...

class BlockMap(_message.Message):
    __slots__ = ("pool", "blocks_per_cell", "cells", "holders", "age_s", "fenced_worker_ids", "last_audit", "last_audit_age_s")
    POOL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_PER_CELL_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    FENCED_WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    LAST_AUDIT_FIELD_NUMBER: _ClassVar[int]
    LAST_AUDIT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    pool: Pool
    blocks_per_cell: int
    cells: _containers.RepeatedCompositeFieldContainer[BlockCell]
    holders: _containers.RepeatedCompositeFieldContainer[BlockHolder]
    age_s: int
    fenced_worker_ids: _containers.RepeatedScalarFieldContainer[str]
    last_audit: PoolAudit
    last_audit_age_s: int
    def __init__(self, pool: _Optional[_Union[Pool, _Mapping]] = ..., blocks_per_cell: _Optional[int] = ..., cells: _Optional[_Iterable[_Union[BlockCell, _Mapping]]] = ..., holders: _Optional[_Iterable[_Union[BlockHolder, _Mapping]]] = ..., age_s: _Optional[int] = ..., fenced_worker_ids: _Optional[_Iterable[str]] = ..., last_audit: _Optional[_Union[PoolAudit, _Mapping]] = ..., last_audit_age_s: _Optional[int] = ...) -> None: ...

class BlockCell(_message.Message):
    __slots__ = ("index", "num_unread", "num_cached", "num_held", "num_shared", "num_quarantined", "holder_slot", "changed_s")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_UNREAD_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARED_FIELD_NUMBER: _ClassVar[int]
    NUM_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    HOLDER_SLOT_FIELD_NUMBER: _ClassVar[int]
    CHANGED_S_FIELD_NUMBER: _ClassVar[int]
    index: int
    num_unread: int
    num_cached: int
    num_held: int
    num_shared: int
    num_quarantined: int
    holder_slot: int
    changed_s: int
    def __init__(self, index: _Optional[int] = ..., num_unread: _Optional[int] = ..., num_cached: _Optional[int] = ..., num_held: _Optional[int] = ..., num_shared: _Optional[int] = ..., num_quarantined: _Optional[int] = ..., holder_slot: _Optional[int] = ..., changed_s: _Optional[int] = ...) -> None: ...

class BlockHolder(_message.Message):
    __slots__ = ("slot", "holder")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    slot: int
    holder: Holder
    def __init__(self, slot: _Optional[int] = ..., holder: _Optional[_Union[Holder, _Mapping]] = ...) -> None: ...

class DescribeBlocksRequest(_message.Message):
    __slots__ = ("pool_id", "cell")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    CELL_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    cell: int
    def __init__(self, pool_id: _Optional[str] = ..., cell: _Optional[int] = ...) -> None: ...

class DescribeBlocksResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[Block]
    def __init__(self, blocks: _Optional[_Iterable[_Union[Block, _Mapping]]] = ...) -> None: ...

class Block(_message.Message):
    __slots__ = ("block_id", "state", "num_holders", "prefix_hash", "cached_at", "holder_ids")
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_HOLDERS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    CACHED_AT_FIELD_NUMBER: _ClassVar[int]
    HOLDER_IDS_FIELD_NUMBER: _ClassVar[int]
    block_id: int
    state: str
    num_holders: int
    prefix_hash: bytes
    cached_at: int
    holder_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, block_id: _Optional[int] = ..., state: _Optional[str] = ..., num_holders: _Optional[int] = ..., prefix_hash: _Optional[bytes] = ..., cached_at: _Optional[int] = ..., holder_ids: _Optional[_Iterable[str]] = ...) -> None: ...
