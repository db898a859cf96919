"""Opens the tracer of a service that has an OTLP endpoint.

OpenTelemetry is imported here, inside a function, and nowhere else but in `tracer.py`: a service
without an endpoint does not load it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pydantic import Field, field_validator

from services.runtime.config import ServiceSettings, env_prefix
from services.runtime.errors import StartupError

if TYPE_CHECKING:
    from services.runtime.tracing.tracer import Tracer


class TracedSettings(ServiceSettings):
    """Settings of services that report spans."""

    otlp_endpoint: str | None = Field(
        default=None,
        description="collector of traces, OTLP over gRPC: http://HOST:4317, or https://; none: "
        "no traces",
    )

    @field_validator("otlp_endpoint")
    @classmethod
    def _check_endpoint(cls, url: str | None) -> str | None:
        scheme, _, address = (url or "").partition("://")
        if url is not None and (scheme not in ("http", "https") or not address.strip("/")):
            raise ValueError(f"{url!r} is not a URL such as http://127.0.0.1:4317")
        return url


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
    """The service's tracer; None without an endpoint. `ratio`: the share of requests to trace whose
    clients do not decide that themselves. StartupError: OpenTelemetry is not installed."""
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
