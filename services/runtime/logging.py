"""Structured logs on stderr, for the loggers of Quire and of libraries: constant snake_case events
with keys, as JSON or as lines for people.

Every line of a task has the keys that the task has bound with `structlog.contextvars`, such as
`request_id`, which `services.runtime.rpc.interceptor` binds from the gRPC metadata.
"""

import logging
import sys
from typing import TextIO, cast

import structlog
from structlog.types import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from services.runtime.config import LogFormat, LogLevel
from services.runtime.console import LineRenderer

_FIRST_KEYS = ("timestamp", "level", "service", "event")


def get_logger(name: str) -> FilteringBoundLogger:
    """The logger of a module. Modules may call this at import, before `configure_logging`."""
    return cast(FilteringBoundLogger, structlog.get_logger(name))


def configure_logging(
    service: str,
    level: LogLevel = "info",
    log_format: LogFormat = "auto",
    stream: TextIO | None = None,
) -> None:
    """Set up structlog and the standard library's logging, once, at the start of a process."""
    stream = stream or sys.stderr
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        _AddService(service),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            *_renderers(log_format, stream),
        ],
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )


def bind_request_id(request_id: str) -> None:
    """Add the id to all further lines of the current task and of the tasks that it starts."""
    structlog.contextvars.bind_contextvars(request_id=request_id)


class _AddService:
    """Adds the service's name to each line."""

    def __init__(self, service: str) -> None:
        self._service = service

    def __call__(self, _logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event.setdefault("service", self._service)
        return event


def _renderers(log_format: LogFormat, stream: TextIO) -> list[Processor]:
    if log_format == "auto":
        log_format = "console" if stream.isatty() else "json"
    # Plain tracebacks: with the values of variables they would show prompts and secrets.
    plain = structlog.processors.format_exc_info
    if log_format == "json":
        return [plain, _order_keys, structlog.processors.JSONRenderer()]
    is_piped = log_format == "supervised"
    return [plain, LineRenderer(has_time=not is_piped, has_colours=is_piped or stream.isatty())]


def _order_keys(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Puts the same keys first on every line, so that the JSON is easier to read."""
    return {key: event.pop(key) for key in _FIRST_KEYS if key in event} | dict(event)
