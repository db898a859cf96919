"""The common part of all toys: each writes its pid into the run directory, and ends as a service
must."""

import os
import signal
import sys
from pathlib import Path


def run(role: str) -> None:
    """Behave according to TOY_<ROLE>: `cannot-start` (also if the run directory has a file of that
    name), `stubborn` (ignores SIGTERM), or serve."""
    if "--check" in sys.argv:
        check(role)
    behaviour = os.environ.get(f"TOY_{role.upper()}", "")
    if behaviour == "cannot-start" or (run_dir(role) / f"{role}-cannot-start").exists():
        print("error: there is no memory", file=sys.stderr)
        sys.exit(2)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if behaviour == "stubborn" else _leave)
    signal.signal(signal.SIGUSR1, _leave)
    enter(role)
    wait_for_parent()


def check(role: str) -> None:
    """As a service's --check: pool memory of 1MiB is too little."""
    if os.environ.get(f"QUIRE_{role.upper()}_POOL_MEMORY") == "1MiB":
        print("error: pool memory is too small", file=sys.stderr)
        sys.exit(2)
    sys.exit(0)


def enter(role: str) -> None:
    members = run_dir(role) / "members"
    members.mkdir(exist_ok=True)
    (members / f"{role}-{os.getpid()}").touch()
    locks = run_dir(role) / "pools" / "toy" / "workers"
    locks.mkdir(parents=True, exist_ok=True)
    (locks / f"{role}-{os.getpid()}.lock").touch()
    print(f"{role} serves", flush=True)


def run_dir(role: str) -> Path:
    return Path(os.environ[f"QUIRE_{role.upper()}_RUN_DIR"])


def wait_for_parent() -> None:
    """Wait until the supervisor's end of the pipe closes, however the supervisor dies."""
    while os.read(int(os.environ["QUIRE_PARENT_FD"]), 1):
        pass


def _leave(_number: int, _frame: object) -> None:
    sys.exit(0)
