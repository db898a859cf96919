from quire.v1 import ticket_pb2 as _ticket_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ("protocol_version", "function_library")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_LIBRARY_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    function_library: str
    def __init__(self, protocol_version: _Optional[int] = ..., function_library: _Optional[str] = ...) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("header", "transport", "memory")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    header: bytes
    transport: str
    memory: bytes
    def __init__(self, header: _Optional[bytes] = ..., transport: _Optional[str] = ..., memory: _Optional[bytes] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("ticket", "source_pool_id")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    SOURCE_POOL_ID_FIELD_NUMBER: _ClassVar[int]
    ticket: _ticket_pb2.Ticket
    source_pool_id: str
    def __init__(self, ticket: _Optional[_Union[_ticket_pb2.Ticket, _Mapping]] = ..., source_pool_id: _Optional[str] = ...) -> None: ...

class PullResponse(_message.Message):
    __slots__ = ("ticket", "num_blocks", "copying")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COPYING_FIELD_NUMBER: _ClassVar[int]
    ticket: _ticket_pb2.TicketState
    num_blocks: int
    copying: bool
    def __init__(self, ticket: _Optional[_Union[_ticket_pb2.TicketState, _Mapping]] = ..., num_blocks: _Optional[int] = ..., copying: _Optional[bool] = ...) -> None: ...
