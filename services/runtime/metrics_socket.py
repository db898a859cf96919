"""The metrics of a run's services, together at one gateway.

A service without a metrics port writes its metrics to whoever connects to a Unix socket in the run
directory. The gateway asks all of these sockets at a scrape, and adds the labels `job` and
`instance`, as Prometheus does for a service that it scrapes itself.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from services.runtime.errors import StartupError

_encode = cast(Callable[..., bytes], generate_latest)
_parse = cast(Callable[[str], Iterator[Metric]], text_string_to_metric_families)

_LIMIT_S = 1.0
"""How long a scrape waits for one service. A stopped service must not hold up the others."""
_MAX_BYTES = 4 << 20
_NUM_AT_ONCE = 16


@contextmanager
def metrics_socket(path: Path, registry: CollectorRegistry) -> Iterator[None]:
    """Write the metrics to everybody who connects to `path`, from a thread of its own.

    Raises StartupError if the service cannot listen there.
    """
    path.unlink(missing_ok=True)
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        listener.listen()
    except OSError as error:
        raise StartupError(f"metrics: cannot listen on {path}: {error}") from error
    thread = threading.Thread(target=_answer_all, args=(listener, registry), name="metrics")
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)  # ends `accept`
        thread.join()
        listener.close()
        path.unlink(missing_ok=True)


def _answer_all(listener: socket.socket, registry: CollectorRegistry) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            connection.settimeout(_LIMIT_S)
            try:
                connection.sendall(_encode(registry, escaping="allow-utf-8"))
            except OSError:
                continue  # the reader has gone, or does not read


class WithServices(Collector):
    """The metrics of `own`, and of all services whose sockets are in `directory`. A service that
    does not answer is left out, as it is in a scrape of its own."""

    def __init__(self, own: CollectorRegistry, directory: Path) -> None:
        self._own, self._directory = own, directory

    def collect(self) -> Iterator[Metric]:
        families = {family.name: family for family in self._own.collect()}
        paths = sorted(self._directory.glob("*.sock"))
        with ThreadPoolExecutor(_NUM_AT_ONCE) as pool:
            for family in (each for found in pool.map(_families, paths) for each in found):
                known = families.setdefault(family.name, family)
                if known is not family and known.type == family.type:
                    known.samples += family.samples
        yield from families.values()


def _families(path: Path) -> list[Metric]:
    """The metrics of one service, with its labels; empty if it does not answer in time."""
    labels = {"job": path.stem.rpartition("-")[0], "instance": path.stem}
    try:
        families = list(_parse(_read(path)))
    except (OSError, ValueError):
        return []
    for family in families:
        family.samples = [
            sample._replace(labels={**sample.labels, **labels}) for sample in family.samples
        ]
    return families


def _read(path: Path) -> str:
    """Return all that a service writes. Raises OSError if it fails, or is too slow or too long."""
    content = bytearray()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_LIMIT_S)
        connection.connect(str(path))
        while piece := connection.recv(1 << 16):
            content += piece
            if len(content) > _MAX_BYTES:
                raise OSError(f"{path}: more than {_MAX_BYTES} bytes of metrics")
    return content.decode()
