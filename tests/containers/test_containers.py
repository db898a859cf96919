"""docker-compose.yml in a Docker engine: every stream has its undisturbed answer while containers
are scaled, killed and restarted, and the audit is clean afterwards."""

from collections.abc import Callable, Iterator

import pytest

from quire.client import Client
from quire.connections import Tls
from quire.errors import Unreachable
from quire.module_command import service_command
from tests.chaos.cases import Case
from tests.waiting import wait_until

from .deployment import Deployment
from .users import Users

pytestmark = [pytest.mark.containers, pytest.mark.timeout(2400)]

BACK_S = 90.0
DOWN_S = 40.0


def wait_for(condition: Callable[[], bool], what: str, limit_s: float = BACK_S) -> None:
    wait_until(condition, limit_s=limit_s, explain=lambda: what)


@pytest.fixture
def users(running: Deployment, client: Client, cases: list[Case]) -> Iterator[Users]:
    """At the end each user has had a new answer, no stream was wrong or broken, the audit is clean
    and nothing is held."""
    with Users(client, cases) as users:
        users.wait_until_streaming()
        yield users
        users.wait_until_served()
    assert not users.violations, running.logs()
    wait_for(lambda: nothing_is_held(running), "a clean audit with nothing held")


def nothing_is_held(running: Deployment) -> bool:
    audits = running.audits()
    return bool(audits) and not any(audit["num_held"] or audit["violations"] for audit in audits)


_SPEAK_HTTP_2_WITHOUT_TLS = """
import socket
connection = socket.create_connection(("127.0.0.1", 50051), 10)
connection.sendall(b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + bytes(3) + bytes([4]) + bytes(5))
try:
    print(connection.recv(1000))
except ConnectionError:
    print(b"")
"""


@pytest.mark.parametrize("service", ["block-manager", "prefill", "decode"])
def test_services_take_connections_with_tls_only(running: Deployment, service: str) -> None:
    assert "ready" in running.run_in(service, "quire-probe", "9090")
    assert running.run_in(service, "python", "-c", _SPEAK_HTTP_2_WITHOUT_TLS).strip() == "b''"


def test_clients_need_the_deployments_ca(running: Deployment) -> None:
    with Client(running.address) as plain, pytest.raises(Unreachable):
        plain.is_ready()
    with Client(running.address, tls=Tls(running.ca)) as trusting:
        assert trusting.is_ready()


def test_scaling_decode_up_and_down(running: Deployment, users: Users) -> None:
    """Each `up` also renews the certificates of the running services; no container that runs is
    replaced."""
    before = running.compose("ps", "--quiet").split()
    running.up("--scale", "decode=3")
    assert len(running.containers("decode")) == 3
    assert set(before) < set(running.compose("ps", "--quiet").split())
    users.wait_until_served()
    running.up("--scale", "decode=1")
    assert len(running.containers("decode")) == 1


@pytest.mark.parametrize("service", ["decode", "prefill", "gateway", "block-manager"])
def test_a_killed_process_comes_back(running: Deployment, users: Users, service: str) -> None:
    """SIGKILL, as by the kernel when memory is short: Docker starts the container again."""
    (container,) = running.containers(service)
    before = running.num_starts(container)
    kill_service(running, service)
    wait_for(lambda: running.num_starts(container) > before, f"{service} started again")
    running.up()


_KILL = """
import os, signal, sys, time
network = os.readlink("/proc/self/ns/net")
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        words = open(f"/proc/{pid}/cmdline", "rb").read().split(b"\\0")
        is_here = os.readlink(f"/proc/{pid}/ns/net") == network
    except OSError:  # it has ended, or belongs to another user
        continue
    if is_here and b" ".join(words[1:]).startswith(sys.argv[1].encode()):
        if not os.fork():  # in a child, since its end may end the container, and this command
            os.closerange(0, 3)
            time.sleep(0.2)
            os.kill(int(pid), signal.SIGKILL)
        sys.exit()
sys.exit("the process was not found")
"""


def kill_service(running: Deployment, service: str) -> None:
    """Kill the service's process. The container's first one is `init`, which cannot be killed from
    inside; and some containers see the processes of all others."""
    _, _, *command = service_command(service.replace("-", "_"))
    running.run_in(service, "python", "-c", _KILL, " ".join(command))


def test_a_killed_container_of_several(running: Deployment, users: Users) -> None:
    """`docker compose kill` of all decode workers; Docker leaves them dead until the next `up`."""
    running.up("--scale", "decode=2")
    running.compose("kill", "--signal", "SIGKILL", "decode")
    running.up("--scale", "decode=1")


@pytest.mark.parametrize("service", ["redis", "gateway"])
def test_a_restart(running: Deployment, users: Users, service: str) -> None:
    """Redis forgets everything; a gateway ends its streams, and clients resume them."""
    running.compose("restart", service)


def test_down_under_load_and_up_again(running: Deployment, cases: list[Case]) -> None:
    """Until it ends, every stream is right; afterwards no container remains."""
    with Client(running.address, tls=Tls(running.ca), resume_window_s=1.0) as client:
        with Users(client, cases) as users:
            users.wait_until_streaming()
            running.compose("down", limit_s=DOWN_S)
        assert not users.wrong
    assert not running.containers()
    running.up()
    with Client(running.address, tls=Tls(running.ca)) as client, Users(client, cases) as users:
        users.wait_until_served()
    assert not users.violations
