"""Metrics in Prometheus' formats, and the `/metrics` endpoint of a service."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, cast
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import ThreadingWSGIServer, choose_encoder
from prometheus_client.registry import Collector

from services.runtime.config import ServiceSettings
from services.runtime.errors import StartupError
from services.runtime.health import Health
from services.runtime.logging import get_logger
from services.runtime.metrics_socket import metrics_socket

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

log = get_logger(__name__)

_LIMIT_S = 5.0
"""How long a connection may be silent."""


def exposition(registry: Collector, accept: str) -> tuple[bytes, str]:
    """The metrics in the format that the header `accept` asks for (Prometheus text or OpenMetrics),
    and the content type.

    Names keep their colon in both formats, so that queries do not depend on the format of the
    scrape. prometheus_client's other escapings write a TYPE line for `quire:x` but samples of
    `quire_x`, which a parser takes for two metrics (client_python issue 1177). Prometheus has
    always allowed each name that Quire uses, so none needs escaping.
    """
    encoder, content_type = choose_encoder(accept)
    encode = cast(Callable[..., bytes], encoder)
    return encode(registry, escaping="allow-utf-8"), content_type.partition("; escaping=")[0]


@contextmanager
def metrics_endpoint(
    settings: ServiceSettings,
    registry: CollectorRegistry,
    health: Health | None = None,
    *,
    shares_port: bool = False,
) -> Iterator[int | None]:
    """Serves `/metrics`, and `/health` if there is a `health`, from a thread of its own; yields the
    port. Without `metrics_port`, yields None, and serves `metrics_socket` if there is one. With
    `shares_port` another process of this user may listen on the same port.

    Raises StartupError if the service cannot listen there.
    """
    if settings.metrics_port is None:
        path = settings.metrics_socket
        with nullcontext() if path is None else metrics_socket(path, registry):
            yield None
        return
    try:
        application = _application(registry, health)
        server = _server(settings.host, settings.metrics_port, application, shares_port)
    except OSError as error:
        raise StartupError(
            f"metrics: cannot listen on {settings.host}:{settings.metrics_port}: {error.strerror}"
        ) from error
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    log.info("metrics_listening", port=server.server_port)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _application(registry: CollectorRegistry, health: Health | None) -> "WSGIApplication":
    def answer(environ: "WSGIEnvironment", start_response: "StartResponse") -> list[bytes]:
        if health is not None and environ["PATH_INFO"] == "/health":
            is_well = health.is_well()
            start_response("200 OK" if is_well else "503 Service Unavailable", [])
            return [b"serving\n" if is_well else b"not serving\n"]
        content, content_type = exposition(registry, environ.get("HTTP_ACCEPT", ""))
        start_response("200 OK", [("Content-Type", content_type)])
        return [content]

    return answer


class _QuietHandler(WSGIRequestHandler):
    timeout = _LIMIT_S

    def handle(self) -> None:
        """Answer a request. A client that is silent or gone is no error of the service."""
        with suppress(OSError):
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def _server(
    host: str, port: int, application: "WSGIApplication", shares_port: bool
) -> ThreadingWSGIServer:
    found, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found

    class Server(ThreadingWSGIServer):
        address_family = family
        allow_reuse_port = shares_port
        request_queue_size = 128

    return make_server(str(address[0]), port, application, Server, _QuietHandler)
