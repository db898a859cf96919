"""The table from domain errors to statuses: complete, most specific first, without internals."""

import asyncio
from collections.abc import Iterator

import pytest
import structlog
from grpc import StatusCode

from blockstore import errors as store
from services.runtime import errors as domain
from services.runtime.rpc.error_table import (
    FAILURES,
    RemoteError,
    code_of,
    expected_failure,
    failure_of,
)
from services.runtime.rpc.interceptor import trailers


def descendants(cls: type[Exception]) -> Iterator[type[Exception]]:
    for sub in cls.__subclasses__():
        yield sub
        yield from descendants(sub)


# A subclass elsewhere that has no code of its own is mapped as its parent.
DOMAIN = sorted(
    {cls for cls in descendants(domain.QuireError) if "code" in vars(cls)} - {RemoteError},
    key=lambda cls: cls.__name__,
)
STORE = sorted(
    set(descendants(store.BlockStoreError)) - {store.LedgerError}, key=lambda cls: cls.__name__
)


@pytest.mark.parametrize(
    "error", DOMAIN + STORE, ids=lambda cls: f"{cls.__module__}.{cls.__name__}"
)
def test_every_error_has_a_row_of_its_own(error: type[Exception]) -> None:
    """The test fails for a new error class without a status."""
    assert error in FAILURES


@pytest.mark.parametrize("error", DOMAIN, ids=lambda cls: cls.__name__)
def test_the_row_carries_the_errors_code(error: type[domain.QuireError]) -> None:
    assert FAILURES[error].code == error.code


def test_codes_mean_one_status_each() -> None:
    """A client may decide by the code alone."""
    by_code: dict[str, set[tuple[StatusCode, int]]] = {}
    for fault in FAILURES.values():
        by_code.setdefault(fault.code, set()).add((fault.status, fault.http_status))
    assert {code: statuses for code, statuses in by_code.items() if len(statuses) > 1} == {}


@pytest.mark.parametrize(
    ("error", "status", "http_status"),
    [
        (domain.PromptTooLong("p"), StatusCode.INVALID_ARGUMENT, 400),
        (domain.UnknownModel("m"), StatusCode.NOT_FOUND, 404),
        (domain.DuplicateRequest("d"), StatusCode.ALREADY_EXISTS, 409),
        (domain.QueueFull("q", 1.0), StatusCode.RESOURCE_EXHAUSTED, 429),
        (domain.NoWorker("n"), StatusCode.UNAVAILABLE, 503),
        (domain.DeadlineExceeded("d"), StatusCode.DEADLINE_EXCEEDED, 408),
        (domain.KVCorrupt("k"), StatusCode.DATA_LOSS, 500),
        (store.StaleHolder("s"), StatusCode.ABORTED, 409),
        (store.StoreUnavailable("s"), StatusCode.UNAVAILABLE, 503),
        (store.OutOfBlocks(3, 1), StatusCode.RESOURCE_EXHAUSTED, 429),
        (TimeoutError(), StatusCode.DEADLINE_EXCEEDED, 408),
    ],
)
def test_statuses_are_those_of_the_contract(
    error: Exception, status: StatusCode, http_status: int
) -> None:
    failure = failure_of(error)
    assert (failure.status, failure.http_status) == (status, http_status)


def test_the_most_specific_class_decides() -> None:
    """A subclass without a row takes its parent's; PromptTooLong does not take InvalidRequest's."""

    class EmptyPrompt(domain.InvalidRequest):
        pass

    assert expected_failure(EmptyPrompt("empty")) is FAILURES[domain.InvalidRequest]
    assert failure_of(domain.PromptTooLong("long")).code == "context_length_exceeded"


def test_an_error_of_ours_is_logged_and_hidden() -> None:
    """The client gets an error id; the log has the same id with the exception."""
    error = KeyError("/etc/quire/secret")
    with structlog.testing.capture_logs() as logs:
        failure = failure_of(error)
    assert (failure.status, failure.http_status, failure.code) == (
        StatusCode.INTERNAL,
        500,
        "internal",
    )
    assert "secret" not in failure.text
    (line,) = logs
    assert line["event"] == "internal_error"
    assert line["exc_info"] is error
    assert failure.text == f"internal error {line['error_id']}"


def test_the_stores_text_stays_inside() -> None:
    """Clients do not learn the store's address."""
    assert "10.0.0.7" not in failure_of(store.StoreUnavailable("10.0.0.7:6379 refused")).text


def test_a_retry_delay_becomes_a_trailer() -> None:
    assert trailers(failure_of(domain.QueueFull("full", 1.25))) == (
        ("quire-error-code", "queue_full"),
        ("grpc-retry-pushback-ms", "1250"),
    )
    assert trailers(failure_of(domain.UnknownModel("m"))) == (
        ("quire-error-code", "model_not_found"),
    )


@pytest.mark.parametrize("error", FAILURES, ids=lambda cls: cls.__name__)
def test_every_503_that_may_pass_says_when_to_try_again(error: type[Exception]) -> None:
    failure = FAILURES[error]
    if failure.http_status == 503 and error is not store.StoreUnsuitable:
        assert failure.retry_delay_s


def test_cancellation_is_not_an_error() -> None:
    """`failure_of` takes Exceptions, and CancelledError is none, so no row can catch it."""
    assert not issubclass(asyncio.CancelledError, Exception)
    assert expected_failure(asyncio.CancelledError()) is None


def test_code_of_another_service_is_the_one_in_logs_and_metrics() -> None:
    """Such as that of the supervisor, which refuses a number of workers."""
    error = RemoteError("decode=50", "invalid_argument", StatusCode.INVALID_ARGUMENT)
    assert code_of(error) == "invalid_argument"
