"""`quire serve` on two hosts, one with prefill workers and one with decode workers, which join by
one Redis: requests are served at the gateways of both."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from quire.certificates import write_certificates
from quire.client import Client
from quire.errors import Unavailable
from tests.conftest import Valkey
from tests.waiting import wait_until

from .conftest import POOL_MEMORY, Oracle
from .deployment import Deployment, remove
from .hosts import SECRET
from .network import ADDRESSES, Network, why_not
from .test_serving import greedy, prompt

WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "it may")

REDIS_PORT, GRPC_PORT, HTTP_PORT = 7390, 7391, 7392


def serve(network: Network, name: str, folder: Path, *flags: str) -> Deployment:
    """`quire serve` on a host. Returns at once."""
    run_root, log = Path(f"/dev/shm/quire-test-{os.getpid()}-{name}"), folder / f"{name}.log"
    command = [
        *(*network.within(name), sys.executable, "-m", "quire.cli", "serve", "--threads", "1"),
        *("--redis-url", f"redis://{ADDRESSES['here']}:{REDIS_PORT}"),
        *("--service-host", ADDRESSES[name], "--host", ADDRESSES[name]),
        *("--secret-file", str(folder / "secret"), "--service-tls", str(folder / "tls")),
        *("--grpc-port", str(GRPC_PORT), "--http-port", str(HTTP_PORT)),
        *("--run-root", str(run_root), "--pool-memory", str(POOL_MEMORY), *flags),
    ]
    environment = {**os.environ, "UCX_TLS": "tcp,self", "QUIRE_GATEWAY_PATIENCE_S": "0.5"}
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    address = f"{ADDRESSES[name]}:{GRPC_PORT}"
    return Deployment(process, address, "", run_root, log)


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    (tmp_path / "secret").write_text(SECRET)
    write_certificates(tmp_path / "tls", (), (), 1)
    options = ("--port", str(REDIS_PORT), "--bind", ADDRESSES["here"], "--protected-mode", "no")
    valkey, network = Valkey(tmp_path, *options), Network()
    valkey.start()
    yield network
    valkey.kill()
    network.close()


def test_prefill_and_decode_workers_on_hosts_of_their_own(
    network: Network, checkpoint: Path, tmp_path: Path, oracle: Oracle
) -> None:
    """The first host says what it waits for, and its gateway why it serves nothing."""
    model = str(checkpoint)
    with ExitStack() as stack:

        def start(name: str, *flags: str) -> Any:
            deployment = serve(network, name, tmp_path, model, *flags)
            stack.callback(remove, deployment.run_root)
            stack.callback(deployment.stop)
            client = stack.enter_context(Client(deployment.address))
            return client, deployment.log

        decode, decode_log = start("b", "--prefill", "0", "--decode", "2")
        waiting = "waiting for prefill workers of tiny on another host"
        wait_until(decode_log.read_text, lambda log: waiting in log)
        with pytest.raises(Unavailable, match="no prefill worker serves 'tiny' now"):
            decode.complete(prompt(1, 40), greedy(4))
        prefill, prefill_log = start("a", "--prefill", "1", "--decode", "0")
        for log in (prefill_log, decode_log):
            wait_until(log.read_text, lambda text: "Quire is serving" in text)
        for number, client in enumerate((prefill, decode)):
            tokens = prompt(number, 100)
            assert list(client.complete(tokens, greedy(8)).token_ids) == oracle.greedy(tokens, 8)
