"""Opens the tracer of a service that has an OTLP endpoint.

OpenTelemetry is imported here, inside a function, and nowhere else but in `tracer.py`: a service
without an endpoint does not load it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from quire.options.shared import TraceOptions
from services.runtime.config import ServiceSettings, env_prefix
from services.runtime.errors import StartupError

if TYPE_CHECKING:
    from services.runtime.tracing.tracer import Tracer


class TracedSettings(ServiceSettings, TraceOptions):
    """Settings of services that report spans."""


def check_tracing(settings: TracedSettings) -> None:
    """Raises StartupError if the service has an endpoint and OpenTelemetry is not installed."""
    if settings.otlp_endpoint is None:
        return
    try:
        import services.runtime.tracing.tracer  # noqa: F401
    except ImportError as error:
        raise StartupError(
            f"{env_prefix(type(settings))}OTLP_ENDPOINT is set, but OpenTelemetry is not "
            f"installed ({error}): pip install 'quire-serve[tracing]'"
        ) from error


@contextmanager
def open_tracer(settings: TracedSettings, ratio: float = 1.0) -> "Iterator[Tracer | None]":
    """The service's tracer; None without an endpoint. `ratio` is the share of requests to trace if
    their clients do not decide that themselves. Raises StartupError if OpenTelemetry is not
    installed."""
    if settings.otlp_endpoint is None:
        yield None
        return
    check_tracing(settings)
    from services.runtime.tracing.tracer import Tracer

    tracer = Tracer(settings.otlp_endpoint, settings.service, ratio)
    try:
        yield tracer
    finally:
        tracer.close()
