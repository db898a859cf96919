"""deploy/host.yml: two hosts in one Docker engine, which share a network. One has Redis, the
gateway and the prefill worker, the other one the decode worker."""

import io
import os
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from quire.client import Client
from quire.connections import Tls
from tests.chaos.cases import Case

from .deployment import ROOT, Deployment, built
from .engine import HERE, Environment
from .test_containers import kill_service, nothing_is_held, wait_for
from .users import Users

pytestmark = [pytest.mark.containers, pytest.mark.timeout(2400)]

FILES = (
    *(ROOT / "docker-compose.yml", ROOT / "deploy" / "host.yml"),
    *(HERE / "build.yml", HERE / "several-hosts.yml"),
)
NETWORK = "quire-test-hosts"
CREDENTIALS = ("secret", "redis-password", "tls/ca.crt", "tls/service.crt", "tls/service.key")


@pytest.fixture(scope="module")
def network(environment: Environment) -> Iterator[str]:
    """A network that spans both hosts."""
    bridge = f"com.docker.network.bridge.name={environment['QUIRE_TEST_BRIDGE']}h"
    create = ["docker", "network", "create", "--opt", bridge, NETWORK]
    subprocess.run(create, env=environment, check=True, capture_output=True)
    yield NETWORK
    remove = ["docker", "network", "rm", NETWORK]
    subprocess.run(remove, env=environment, check=True, capture_output=True)


@pytest.fixture(scope="module")
def hosts(
    environment: Environment, network: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Deployment, Deployment]]:
    folder = tmp_path_factory.mktemp("hosts")
    environment = environment | {"QUIRE_NETWORK": network}
    a_profiles, b_profiles = ({"COMPOSE_PROFILES": p} for p in ("store,gateway,prefill", "decode"))
    credentials = {"QUIRE_CREDENTIALS_DIR": str(folder / "credentials")}
    with ExitStack() as stack:

        def host(name: str, environment: Environment) -> Deployment:
            project = f"quire-test-{name}"
            return stack.enter_context(built(environment, folder / "ca.crt", project, FILES))

        a = host("a", environment | a_profiles)
        b = host("b", environment | b_profiles | credentials)
        a.compose("up", "--detach")
        copy_credentials(a, folder / "credentials")
        b.compose("up", "--wait")
        a.up()
        yield a, b


def copy_credentials(a: Deployment, folder: Path) -> None:
    """As the documentation does: with the user to whom they belong."""
    packed = a.run_in("block-manager", "tar", "-C", "/run/quire", "-c", *CREDENTIALS)
    folder.mkdir()
    with tarfile.open(fileobj=io.BytesIO(packed.encode())) as archive:
        archive.extractall(folder, numeric_owner=True, filter="fully_trusted")
    os.chown(folder, 10001, 10001)


@pytest.fixture
def client(hosts: tuple[Deployment, Deployment]) -> Iterator[Client]:
    with Client(hosts[0].address, tls=Tls(hosts[0].ca), resume_window_s=60.0) as connected:
        yield connected


def test_each_host_runs_its_part(hosts: tuple[Deployment, Deployment]) -> None:
    a, b = (set(host.compose("ps", "--services").split()) for host in hosts)
    assert a == {"redis", "gateway", "block-manager", "mover", "prefill"}
    assert b == {"block-manager", "mover", "decode"}


def test_a_request_is_computed_on_one_host_and_decodes_on_the_other(
    hosts: tuple[Deployment, Deployment], client: Client, cases: list[Case]
) -> None:
    """Its tokens are those of the deployment on one host."""
    with Users(client, cases) as users:
        users.wait_until_served()
    assert not users.violations, hosts[0].logs() + hosts[1].logs()
    assert num_pulls(hosts[1]) >= len(cases)
    wait_for(lambda: nothing_is_held(hosts[0]), "a clean audit with nothing held")


@pytest.mark.parametrize("which", [0, 1], ids=["source", "own"])
def test_a_killed_mover_comes_back(
    hosts: tuple[Deployment, Deployment], client: Client, cases: list[Case], which: int
) -> None:
    """Its block manager sees that the process has exited, and releases what it held."""
    host = hosts[which]
    (container,) = host.containers("mover")
    before = host.num_starts(container)
    with Users(client, cases) as users:
        users.wait_until_streaming()
        kill_service(host, "mover")
        wait_for(lambda: host.num_starts(container) > before, "the mover started again")
        users.wait_until_served()
    assert not users.violations, host.logs()
    wait_for(lambda: nothing_is_held(hosts[0]), "a clean audit with nothing held")


def test_the_movers_image_has_no_torch(hosts: tuple[Deployment, Deployment]) -> None:
    with pytest.raises(AssertionError, match="No module named 'torch'"):
        hosts[1].run_in("mover", "python", "-c", "import torch")


def num_pulls(host: Deployment) -> float:
    read = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9090/metrics').read().decode())"
    lines = host.run_in("mover", "python", "-c", read).splitlines()
    pulls = (line for line in lines if line.startswith("quire:mover_pulls_total"))
    return sum(float(line.rpartition(" ")[2]) for line in pulls if 'outcome="done"' in line)
