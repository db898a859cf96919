"""Maps errors to what a client sees: a code, a gRPC status, an HTTP status and a text.

The most specific class of an error decides. An error without a row in the table is a bug in Quire:
it is logged with its traceback and an error id, and the client gets only the id.
"""

import secrets
from dataclasses import dataclass, replace

from google.protobuf.message import DecodeError
from grpc import StatusCode

from blockstore import errors as store
from services.runtime import errors as domain
from services.runtime.logging import get_logger

log = get_logger(__name__)

INTERNAL_CODE = "internal"

_MAX_TEXT_CHARS = 1000
"""Limit of an error's text: it may repeat input of any length, but a gRPC status must fit into
headers."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The answer to one failed request. In the table, an empty `text` means the error's own text;
    a row has a text if the error's own one is not for clients."""

    code: str
    status: StatusCode
    http_status: int
    text: str = ""
    retry_delay_s: float | None = None


class RemoteError(domain.QuireError):
    """An error of another service for which there is no domain error. Raised in a handler, it
    reaches the client with the same code, status and text."""

    def __init__(self, message: str, code: str, status: StatusCode) -> None:
        super().__init__(message)
        self.failure = Failure(code, status, 502, message)


_INVALID, _MISSING = StatusCode.INVALID_ARGUMENT, StatusCode.NOT_FOUND
_EXHAUSTED, _UNAVAILABLE = StatusCode.RESOURCE_EXHAUSTED, StatusCode.UNAVAILABLE
_PRECONDITION = StatusCode.FAILED_PRECONDITION
_NO_STORE = "the block store is not there; try again"

RETRY_S = 1.0
"""The delay after which a client may try again what a service cannot do now."""

_DOMAIN: dict[type[domain.QuireError], tuple[StatusCode, int]] = {
    domain.InvalidRequest: (_INVALID, 400),
    domain.PromptTooLong: (_INVALID, 400),
    domain.Unauthenticated: (StatusCode.UNAUTHENTICATED, 401),
    domain.InvalidApiKey: (StatusCode.UNAUTHENTICATED, 401),
    domain.PermissionDenied: (StatusCode.PERMISSION_DENIED, 403),
    domain.UnknownModel: (_MISSING, 404),
    domain.UnknownWorker: (_MISSING, 404),
    domain.UnknownRequest: (_MISSING, 404),
    domain.DuplicateRequest: (StatusCode.ALREADY_EXISTS, 409),
    domain.Overloaded: (_EXHAUSTED, 429),
    domain.QueueFull: (_EXHAUSTED, 429),
    domain.RateLimited: (_EXHAUSTED, 429),
    domain.Unavailable: (_UNAVAILABLE, 503),
    domain.NoWorker: (_UNAVAILABLE, 503),
    domain.Draining: (_UNAVAILABLE, 503),
    domain.DeadlineExceeded: (StatusCode.DEADLINE_EXCEEDED, 408),
    domain.PoisonRequest: (StatusCode.INTERNAL, 500),
    domain.KVCorrupt: (StatusCode.DATA_LOSS, 500),
    domain.LastWorker: (_PRECONDITION, 409),
    domain.NoSupervisor: (_PRECONDITION, 501),
    domain.VersionMismatch: (_PRECONDITION, 500),
    domain.StartupError: (_PRECONDITION, 500),
}

FAILURES: dict[type[Exception], Failure] = {
    **{
        error: Failure(error.code, *row, retry_delay_s=RETRY_S if row[1] == 503 else None)
        for error, row in _DOMAIN.items()
    },
    store.StoreUnavailable: Failure("store_unavailable", _UNAVAILABLE, 503, _NO_STORE, RETRY_S),
    store.NotPrimary: Failure("not_primary", _UNAVAILABLE, 503, _NO_STORE, RETRY_S),
    store.StoreLost: Failure("store_lost", _UNAVAILABLE, 503, _NO_STORE, RETRY_S),
    store.PoolGone: Failure("pool_gone", _UNAVAILABLE, 503, _NO_STORE, RETRY_S),
    store.StoreUnsuitable: Failure("store_unsuitable", _PRECONDITION, 503, _NO_STORE),
    store.PoolExists: Failure("pool_exists", StatusCode.ALREADY_EXISTS, 409),
    store.Recovering: Failure("recovering", _UNAVAILABLE, 503, _NO_STORE, RETRY_S),
    store.UnknownPool: Failure("unknown_pool", _MISSING, 404),
    store.UnknownWorker: Failure("unknown_worker", _MISSING, 404),
    store.GeometryMismatch: Failure("geometry_mismatch", _PRECONDITION, 409),
    store.FingerprintMismatch: Failure("fingerprint_mismatch", _PRECONDITION, 409),
    store.WorkerFenced: Failure("worker_fenced", _PRECONDITION, 409),
    store.WorkerNotEmpty: Failure("worker_not_empty", _PRECONDITION, 409),
    store.LeaseHeld: Failure("lease_held", _PRECONDITION, 409),
    store.OutOfBlocks: Failure("out_of_blocks", _EXHAUSTED, 429, retry_delay_s=RETRY_S),
    store.MustWait: Failure("must_wait", _EXHAUSTED, 429, retry_delay_s=RETRY_S),
    store.StaleHolder: Failure("stale_holder", StatusCode.ABORTED, 409),
    store.NotHeld: Failure("not_held", _PRECONDITION, 409),
    store.InvalidArgument: Failure("invalid_argument", _INVALID, 400),
    DecodeError: Failure(
        domain.InvalidRequest.code, _INVALID, 400, "the message is not one of this method's"
    ),
    TimeoutError: Failure(
        domain.DeadlineExceeded.code, StatusCode.DEADLINE_EXCEEDED, 408, "the time limit has passed"
    ),
}


_BY_CODE = {error.code: error for error in _DOMAIN}


def error_of(
    code: str, text: str, status: StatusCode = StatusCode.INTERNAL, retry_delay_s: float = RETRY_S
) -> domain.QuireError:
    """The error that another process reports by its code. An unknown code becomes RemoteError, with
    the same code, status and text."""
    error = _BY_CODE.get(code)
    if error is None:
        return RemoteError(text, code or INTERNAL_CODE, status)
    if issubclass(error, domain.Overloaded):
        return error(text, retry_delay_s)
    return error(text)


def expected_failure(error: BaseException) -> Failure | None:
    """Return a RemoteError's own failure, or the row of the error's most specific class that has a
    row; None if no class has one."""
    if isinstance(error, RemoteError):
        return error.failure
    return next((FAILURES[cls] for cls in type(error).__mro__ if cls in FAILURES), None)


def code_of(error: BaseException) -> str:
    """The error's code, as clients, logs and metrics show it."""
    failure = expected_failure(error)
    return failure.code if failure else INTERNAL_CODE


def failure_of(error: Exception) -> Failure:
    """The answer for a client. Logs an error that has no row, with its traceback."""
    row = expected_failure(error)
    if row is None:
        error_id = secrets.token_hex(8)
        log.error("internal_error", error_id=error_id, exc_info=error)
        return Failure(INTERNAL_CODE, StatusCode.INTERNAL, 500, f"internal error {error_id}")
    text = row.text or str(error) or row.code
    if len(text) > _MAX_TEXT_CHARS:
        text = text[:_MAX_TEXT_CHARS] + " ..."
    return replace(row, text=text, retry_delay_s=getattr(error, "retry_delay_s", row.retry_delay_s))
