"""The tests' own engine leaves nothing behind, however the process that uses it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import wait_until

from .engine import NoEngine, left_by, own_engine

pytestmark = pytest.mark.containers

LIMIT_S = 30.0

# Prints where the engine is, and waits to be ended. A network with the bridge is there.
_USER = """
import os, subprocess, sys
from tests.containers.engine import own_engine
bridge = sys.argv[1]
with own_engine(bridge) as engine:
    name = ["--opt", f"com.docker.network.bridge.name={bridge}"]
    create = ["docker", "network", "create", *name, "quire-test"]
    subprocess.run(create, env={**os.environ, **engine}, check=True, stdout=subprocess.DEVNULL)
    print(engine["DOCKER_CONFIG"], flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left(how: signal.Signals) -> None:
    bridge = f"quire-{os.getpid()}x"
    try:
        with own_engine(bridge):
            pass
    except NoEngine as error:
        pytest.skip(str(error))
    user = subprocess.Popen(
        [sys.executable, "-c", _USER, bridge],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with user:
        assert user.stdout
        directory = Path(user.stdout.readline().strip()).parent
        assert len(left_by(directory, bridge)) > 3  # while it runs
        user.send_signal(how)
    wait_until(lambda: left_by(directory, bridge), lambda left: not left, limit_s=LIMIT_S)
