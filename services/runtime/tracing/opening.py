"""Opens the tracer of a service that has an OTLP endpoint.

OpenTelemetry is imported here, inside a function, and nowhere else but in `tracer.py`: a service
without an endpoint does not load it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from services.runtime.config import ServiceSettings, env_prefix
from services.runtime.errors import StartupError

if TYPE_CHECKING:
    from services.runtime.tracing.tracer import Tracer


def check_tracing(settings: ServiceSettings, endpoint: str | None) -> None:
    """Raises StartupError if the service has an endpoint and OpenTelemetry is not installed."""
    if endpoint is None:
        return
    try:
        import services.runtime.tracing.tracer  # noqa: F401
    except ImportError as error:
        raise StartupError(
            f"{env_prefix(type(settings))}OTLP_ENDPOINT is set, but OpenTelemetry is not "
            f"installed ({error}): pip install 'quire-serve[tracing]'"
        ) from error


@contextmanager
def open_tracer(settings: ServiceSettings, endpoint: str | None) -> "Iterator[Tracer | None]":
    """The service's tracer; None without an endpoint. Raises StartupError if OpenTelemetry is not
    installed."""
    if endpoint is None:
        yield None
        return
    check_tracing(settings, endpoint)
    from services.runtime.tracing.tracer import Tracer

    tracer = Tracer(endpoint, settings.service)
    try:
        yield tracer
    finally:
        tracer.close()
