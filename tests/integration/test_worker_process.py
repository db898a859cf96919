"""A decode worker as a process, with a real Valkey. It ends on request in any state."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

import kvops
from bench.make_checkpoint import make_checkpoint
from quire.supervisor.options import ServeOptions
from quire.supervisor.supervisor import EXIT_S
from services.engine.models import load_model
from services.pool.directory import pool_directories
from services.pool.locks import revoke_lock
from tests.waiting import wait_until

LIMIT_S = 60.0

COUNTED_AT_ITS_END = """
import gc, os, runpy, sys
ENDED = '{"event": "ended", "num_collected_from": %d}'
exit_now = os._exit
def count_and_exit(status):
    print(ENDED % len(gc.get_objects()), flush=True)
    exit_now(status)
os._exit = count_and_exit
sys.argv[1:] = ["--role=decode"]
runpy.run_module("services.worker", run_name="__main__")
"""


class Valkey(Protocol):
    url: str

    def stop(self) -> None: ...
    def kill(self) -> None: ...


@dataclass
class Worker:
    process: subprocess.Popen[str]
    root: Path

    def wait_for(self, event: str) -> dict[str, Any]:
        """Wait until its log has the event; returns the event's fields."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{") and (entry := json.loads(line))["event"] == event:
                found: dict[str, Any] = entry
                return found
        raise AssertionError(f"ended without {event}")

    def has_open(self, path: Path) -> bool:
        for link in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # Closed meanwhile.
                if os.readlink(link) == str(path):
                    return True
        return False

    def stop(self) -> int:
        """Stop it; returns the exit status, in less time than a supervisor allows."""
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=ServeOptions().stop_grace_s + EXIT_S)
        return self.process.returncode


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def start(valkey: Valkey, checkpoint: Path, tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def start(*command: str, **changes: str) -> Worker:
        settings = {
            "REDIS_URL": valkey.url,
            "RUN_DIR": str(tmp_path / "run"),
            "POOL_ROOT": str(tmp_path / "pools"),
            "MODEL": str(checkpoint),
            "WEIGHTS_CACHE": str(tmp_path / "cache"),
            "POOL_MEMORY": "16MiB",
            "LOG_FORMAT": "json",
            **changes,
        }
        process = subprocess.Popen(
            [sys.executable, *(command or ("-m", "services.worker", "--role=decode"))],
            env={**os.environ, **{f"QUIRE_DECODE_{name}": text for name, text in settings.items()}},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        workers.append(Worker(process, tmp_path))
        return workers[-1]

    yield start
    for worker in workers:
        worker.process.kill()
        worker.process.communicate()


def test_a_serving_worker_has_a_low_priority_and_removes_its_pool_when_it_leaves(
    start: Callable[..., Worker],
) -> None:
    """Other services have priority over its threads."""
    worker = start()
    worker.wait_for("worker_ready")
    tasks = Path(f"/proc/{worker.process.pid}/task").iterdir()
    levels = [os.getpriority(os.PRIO_PROCESS, int(task.name)) for task in tasks]
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert min(levels) == min(19, own + 5)
    assert len(pool_directories(worker.root / "pools")) == 1
    assert worker.stop() == 0
    assert pool_directories(worker.root / "pools") == ()


def test_garbage_collection_skips_what_a_serving_worker_imported(
    start: Callable[..., Worker],
) -> None:
    """A full collection would otherwise take 0.1 s, a gap in every stream."""
    worker = start("-c", COUNTED_AT_ITS_END)
    worker.wait_for("worker_ready")
    worker.process.send_signal(signal.SIGTERM)
    ended = worker.wait_for("ended")
    assert ended["num_collected_from"] < 20_000


def test_a_worker_that_waits_for_packed_weights_can_stop(
    start: Callable[[], Worker], checkpoint: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    load_model(checkpoint, torch.float32, kvops.backend("cpu"), cache=cache)
    lock, packed = sorted(cache.iterdir(), key=lambda path: path.suffix != ".lock")
    packed.unlink()
    with lock.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        worker = start()
        wait_until(lambda: worker.has_open(lock))
        assert worker.stop() == 0
    assert not packed.exists()


def test_a_worker_without_answers_of_the_server_ends_in_time(
    start: Callable[..., Worker], own_valkey: Valkey
) -> None:
    """It can neither release nor leave; the block manager reaps its blocks."""
    worker = start(REDIS_URL=own_valkey.url, STOP_GRACE_S="6")
    worker.wait_for("worker_ready")
    own_valkey.stop()
    began = time.monotonic()
    assert worker.stop() == 1
    assert time.monotonic() - began < 6 + 1


@pytest.mark.parametrize("server", [pytest.param("dead", marks=pytest.mark.full), "silent"])
def test_a_worker_that_waits_to_rejoin_ends_at_once(
    start: Callable[..., Worker], own_valkey: Valkey, server: str
) -> None:
    """It holds nothing, and the server may never return."""
    worker = start(REDIS_URL=own_valkey.url)
    worker.wait_for("worker_ready")
    (directory,) = pool_directories(worker.root / "pools")
    (name,) = directory.worker_ids()
    own_valkey.kill() if server == "dead" else own_valkey.stop()
    revoke_lock(directory.lock_path(name))
    worker.wait_for("worker_given_up")
    began = time.monotonic()
    assert worker.stop() == 0
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        ({}, 0, ""),
        ({"POOL_MEMORY": "999TiB"}, 2, "error: pool memory and swap memory are 999.00 TiB "),
        ({"SWAP_MEMORY": "999TiB"}, 2, "error: pool memory and swap memory are 999.00 TiB "),
        ({"POOL_MEMORY": "1KiB"}, 2, "error: pool memory 1.00 KiB (1024 bytes) is too small: "),
        ({"MAX_MODEL_LEN": "1000000"}, 2, "error: max_model_len 1000000 is beyond the model's"),
        ({"POOL_MEMORY": "much"}, 2, "error: bad configuration: QUIRE_DECODE_POOL_MEMORY: 'much'"),
        ({"PREEMPTION": "swap"}, 2, "error: bad configuration: QUIRE_DECODE_PREEMPTION: swap,"),
        ({"MODEL": "/nowhere"}, 2, "error: /nowhere: no such checkpoint directory"),
    ],
)
def test_a_check_says_whether_a_worker_could_start_here(
    start: Callable[..., Worker], tmp_path: Path, changes: dict[str, str], status: int, said: str
) -> None:
    """Without a server, and without a start."""
    (tmp_path / "pools").mkdir()
    nobody = "redis://127.0.0.1:1/0"
    worker = start("-m", "services.worker", "--role=decode", "--check", REDIS_URL=nobody, **changes)
    out, _ = worker.process.communicate(timeout=LIMIT_S)
    assert worker.process.returncode == status
    assert out.startswith(said)
    assert len(out.splitlines()) == (1 if said else 0)


def test_a_worker_without_a_role_says_which_there_are() -> None:
    command = [sys.executable, "-m", "services.worker"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert "--role {prefill,decode}" in found.stderr
