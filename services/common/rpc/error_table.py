"""Maps errors to what a client sees: a code, a gRPC status, an HTTP status and a text.

The most specific class of an error decides. An error without a row in the table is a bug in Quire:
it is logged with its traceback and an error id, and the client gets only the id.
"""

import secrets
from dataclasses import dataclass, replace

from google.protobuf.message import DecodeError
from grpc import StatusCode

from blockstore import errors as store
from services.common import errors as domain
from services.common.runtime.logging import get_logger

log = get_logger(__name__)

INTERNAL_CODE = "internal"

_MAX_TEXT_CHARS = 1000
"""Limit of an error's text: it may repeat input of any length, but a gRPC status must fit into
headers."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A row of the table. `text`: replaces the error's own text if that is not for clients."""

    code: str
    status: StatusCode
    http_status: int
    text: str | None = None
    retry_delay_s: float | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """The answer to one failed request."""

    code: str
    status: StatusCode
    http_status: int
    text: str
    retry_delay_s: float | None = None


class PeerFailed(domain.QuireError):
    """An error of another service for which there is no domain error. Raised in a handler, it
    reaches the client with the same code, status and text."""

    def __init__(self, message: str, code: str, status: StatusCode) -> None:
        super().__init__(message)
        self.failure = Failure(code, status, 502, message)


def _domain(error: type[domain.QuireError], status: StatusCode, http_status: int) -> Fault:
    return Fault(error.code, status, http_status)


_INVALID, _MISSING = StatusCode.INVALID_ARGUMENT, StatusCode.NOT_FOUND
_EXHAUSTED, _UNAVAILABLE = StatusCode.RESOURCE_EXHAUSTED, StatusCode.UNAVAILABLE
_PRECONDITION = StatusCode.FAILED_PRECONDITION
_NO_STORE = "the block store is not there; try again"

FAULTS: dict[type[Exception], Fault] = {
    domain.InvalidRequest: _domain(domain.InvalidRequest, _INVALID, 400),
    domain.PromptTooLong: _domain(domain.PromptTooLong, _INVALID, 400),
    domain.Unauthenticated: _domain(domain.Unauthenticated, StatusCode.UNAUTHENTICATED, 401),
    domain.UnknownModel: _domain(domain.UnknownModel, _MISSING, 404),
    domain.UnknownWorker: _domain(domain.UnknownWorker, _MISSING, 404),
    domain.DuplicateRequest: _domain(domain.DuplicateRequest, StatusCode.ALREADY_EXISTS, 409),
    domain.Overloaded: _domain(domain.Overloaded, _EXHAUSTED, 429),
    domain.QueueFull: _domain(domain.QueueFull, _EXHAUSTED, 429),
    domain.WouldBeLate: _domain(domain.WouldBeLate, _EXHAUSTED, 429),
    domain.Unavailable: _domain(domain.Unavailable, _UNAVAILABLE, 503),
    domain.NoWorker: _domain(domain.NoWorker, _UNAVAILABLE, 503),
    domain.Draining: _domain(domain.Draining, _UNAVAILABLE, 503),
    domain.DeadlineExceeded: _domain(domain.DeadlineExceeded, StatusCode.DEADLINE_EXCEEDED, 504),
    domain.PoisonRequest: _domain(domain.PoisonRequest, StatusCode.INTERNAL, 500),
    domain.KVCorrupt: _domain(domain.KVCorrupt, StatusCode.DATA_LOSS, 500),
    domain.LastWorker: _domain(domain.LastWorker, _PRECONDITION, 409),
    domain.NoSupervisor: _domain(domain.NoSupervisor, _PRECONDITION, 501),
    domain.VersionMismatch: _domain(domain.VersionMismatch, _PRECONDITION, 500),
    domain.StartupError: _domain(domain.StartupError, _PRECONDITION, 500),
    store.StoreUnavailable: Fault("store_unavailable", _UNAVAILABLE, 503, _NO_STORE, 1.0),
    store.StoreLost: Fault("store_lost", _UNAVAILABLE, 503, _NO_STORE, 1.0),
    store.PoolGone: Fault("pool_gone", _UNAVAILABLE, 503, _NO_STORE, 1.0),
    store.StoreUnsuitable: Fault("store_unsuitable", _PRECONDITION, 503, _NO_STORE),
    store.PoolExists: Fault("pool_exists", StatusCode.ALREADY_EXISTS, 409),
    store.Recovering: Fault("recovering", _UNAVAILABLE, 503, _NO_STORE, 1.0),
    store.UnknownPool: Fault("unknown_pool", _MISSING, 404),
    store.UnknownWorker: Fault("unknown_worker", _MISSING, 404),
    store.GeometryMismatch: Fault("geometry_mismatch", _PRECONDITION, 409),
    store.FingerprintMismatch: Fault("fingerprint_mismatch", _PRECONDITION, 409),
    store.WorkerFenced: Fault("worker_fenced", _PRECONDITION, 409),
    store.WorkerNotEmpty: Fault("worker_not_empty", _PRECONDITION, 409),
    store.OutOfBlocks: Fault("out_of_blocks", _EXHAUSTED, 429, retry_delay_s=1.0),
    store.MustWait: Fault("must_wait", _EXHAUSTED, 429, retry_delay_s=1.0),
    store.StaleHolder: Fault("stale_holder", StatusCode.ABORTED, 409),
    store.NotHeld: Fault("not_held", _PRECONDITION, 409),
    store.InvalidArgument: Fault("invalid_argument", _INVALID, 400),
    DecodeError: Fault(
        domain.InvalidRequest.code, _INVALID, 400, "the message is not one of this method's"
    ),
    TimeoutError: Fault(
        domain.DeadlineExceeded.code, StatusCode.DEADLINE_EXCEEDED, 504, "the time limit has passed"
    ),
}


def fault_of(error: BaseException) -> Fault | None:
    """The row of the error's most specific class that has a row; None if no class has one."""
    return next((FAULTS[cls] for cls in type(error).__mro__ if cls in FAULTS), None)


def failure_of(error: Exception) -> Failure:
    """The answer for a client. Logs an error that has no row, with its traceback."""
    failure = _failure_of(error)
    if len(failure.text) <= _MAX_TEXT_CHARS:
        return failure
    return replace(failure, text=failure.text[:_MAX_TEXT_CHARS] + " ...")


def _failure_of(error: Exception) -> Failure:
    if isinstance(error, PeerFailed):
        return error.failure
    fault = fault_of(error)
    if fault is None:
        return _internal(error)
    delay_s = getattr(error, "retry_delay_s", fault.retry_delay_s)
    text = fault.text or str(error) or fault.code
    return Failure(fault.code, fault.status, fault.http_status, text, delay_s)


def _internal(error: Exception) -> Failure:
    error_id = secrets.token_hex(8)
    log.error("internal_error", error_id=error_id, exc_info=error)
    return Failure(INTERNAL_CODE, StatusCode.INTERNAL, 500, f"internal error {error_id}")
