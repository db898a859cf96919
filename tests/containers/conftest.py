"""A deployment in containers, and the undisturbed answers to its requests."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from quire.client import Client
from quire.connections import Tls
from tests.chaos.cases import Case

from .deployment import Deployment, building, built
from .engine import Environment, NoEngine, some_engine
from .users import cases_of

RESUME_WINDOW_S = 60.0


@pytest.fixture(scope="session")
def _removed_when_terminated() -> Iterator[None]:
    """SIGTERM ends pytest as Ctrl-C does, so that the containers are removed."""
    assert threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def environment(
    _removed_when_terminated: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Environment]:
    """The environment of `docker`, in an engine in which images can be built."""
    bridge = f"quire-{os.getpid()}"
    try:
        with (
            some_engine(bridge) as engine,
            building(engine, tmp_path_factory.mktemp("containers"), bridge) as environment,
        ):
            yield environment
    except NoEngine as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def running(
    environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """A deployment on one host, started as a user does who builds the images."""
    with built(environment, tmp_path_factory.mktemp("one") / "ca.crt") as run:
        run.up("--build")
        yield run


@pytest.fixture
def client(running: Deployment) -> Iterator[Client]:
    with Client(running.address, tls=Tls(running.ca), resume_window_s=RESUME_WINDOW_S) as connected:
        yield connected


@pytest.fixture(scope="session")
def cases(running: Deployment) -> list[Case]:
    with Client(running.address, tls=Tls(running.ca)) as undisturbed:
        return cases_of(undisturbed)
