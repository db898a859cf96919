"""The previous version and this one, each with a gateway and workers, share one Redis, as in the
middle of an upgrade: the gateway of either version serves the workers of both."""

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import pytest

from quire.client import Client
from quire.errors import QuireError
from quire.supervisor.run_directory import free_port
from quire.types import Sampling
from services.protocol.version import PROTOCOL_VERSION
from tests.conftest import Valkey
from tests.exactness import strategies
from tests.previous_version import COMMIT, git, make_python, why_not
from tests.waiting import wait_until

from .conftest import POOL_MEMORY, Oracle
from .hosts import Host
from .test_serving import greedy, prompt

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "it may"),
    pytest.mark.timeout(1200),  # compiles the previous version's kernels, beside other tests
]

VERSIONS = "previous", "this"
NUM_TOKENS = 24
SAMPLED = "temperature", "4 samples, adjusted", "structured", "4 beams"


@pytest.fixture(scope="module")
def clients(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Client]]:
    """A client of the gateway of each version. The model has the name of its workers' version."""
    folder = tmp_path_factory.mktemp("versions")
    valkey = Valkey(folder)
    with ExitStack() as stack:
        stack.callback(valkey.kill)
        valkey.start()
        hosts, clients = [], {}
        for version in VERSIONS:
            host = Host(version, folder, checkpoint, valkey.url, POOL_MEMORY)
            if version == "previous":
                host.python = make_python(folder / "previous")
            stack.callback(host.stop)
            hosts.append(host)
            port = free_port("127.0.0.1")
            host.start("block_manager")
            host.start("gateway", PORT=str(port), HTTP_PORT="none")
            for role in ("prefill", "decode"):
                host.start(role, MODEL_NAME=version, BACKEND="reference")
            clients[version] = stack.enter_context(Client(f"127.0.0.1:{port}"))
        for host in hosts:
            host.wait_for("prefill", "worker_ready")
            host.wait_for("decode", "worker_ready")
        for version, client in clients.items():
            log = partial(hosts[VERSIONS.index(version)].tail, "gateway")
            wait_until(partial(serves_both, client), limit_s=30, explain=log)
        yield clients


def serves_both(client: Client) -> bool:
    with suppress(QuireError):
        return {model.id for model in client.models()} == set(VERSIONS)
    return False


def test_the_recorded_commit_speaks_the_version_before_this_one() -> None:
    """Otherwise tests/previous_version.txt has to name the commit before the last change of
    `PROTOCOL_VERSION`."""
    text = git("show", f"{COMMIT}:services/protocol/version.py").stdout.decode()
    assert f"PROTOCOL_VERSION = {PROTOCOL_VERSION - 1}\n" in text


@pytest.mark.parametrize("gateway", VERSIONS)
@pytest.mark.parametrize("workers", VERSIONS)
def test_tokens_are_right_between_versions(
    clients: dict[str, Client], oracle: Oracle, gateway: str, workers: str
) -> None:
    asked = prompt(7, 70)
    found = clients[gateway].complete(asked, greedy(NUM_TOKENS), model=workers)
    assert list(found.token_ids) == oracle.choices(asked, found.token_ids)


def test_all_versions_draw_the_same(clients: dict[str, Client]) -> None:
    def answers(gateway: str, workers: str, sampling: Sampling) -> list[tuple[int, ...]]:
        found = clients[gateway].complete(prompt(8, 40), sampling, model=workers)
        return [choice.token_ids for choice in found.choices]

    for strategy in SAMPLED:
        sampling = strategies(NUM_TOKENS)[strategy]
        first, *others = (answers(g, w, sampling) for g in VERSIONS for w in VERSIONS)
        assert all(other == first for other in others), strategy
