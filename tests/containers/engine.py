"""The Docker engine of a test run: a running one, or one that the tests start."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
END_LIMIT_S = 60.0
Environment = dict[str, str]


class NoEngine(Exception):
    """No engine runs here, and none can be started; the text says why."""


@contextmanager
def some_engine(bridge: str) -> Iterator[Environment]:
    """The variables by which `docker` finds an engine. NoEngine: there is none."""
    if _answers():
        yield {}
        return
    with own_engine(bridge) as environment:
        yield environment


def _answers() -> bool:
    if shutil.which("docker") is None:
        return False
    commands = (["docker", "info"], ["docker", "compose", "version"])
    return not any(subprocess.run(c, capture_output=True, timeout=30).returncode for c in commands)


@contextmanager
def own_engine(bridge: str) -> Iterator[Environment]:
    """An engine that runs until the end of this block, or of this process, and leaves nothing
    behind.

    NoEngine: it cannot be started.
    """
    directory = Path(tempfile.mkdtemp(prefix="quire-engine-"))
    process = subprocess.Popen(
        [HERE / "engine.sh", directory, bridge],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for pytest, which removes containers first
    )
    assert process.stdin
    assert process.stdout
    try:
        if (line := process.stdout.readline().strip()) != "ready":
            raise NoEngine(line)
        yield {
            "DOCKER_HOST": f"unix://{directory}/docker.sock",
            "DOCKER_CONFIG": str(directory / "client"),
        }
    finally:
        process.stdin.close()
        process.wait(END_LIMIT_S)
        process.stdout.close()
    assert not left_by(directory, bridge)


def left_by(directory: Path, bridge: str) -> list[str]:
    """The remains of an engine: processes, mounts, links, control groups, files."""
    listing = subprocess.run(["ps", "-wweo", "args"], capture_output=True, text=True, check=True)
    places: dict[str, Sequence[object]] = {
        "process": [line for line in listing.stdout.splitlines() if str(directory) in line],
        "mount": [m for m in Path("/proc/mounts").read_text().splitlines() if str(directory) in m],
        "link": list(Path("/sys/class/net").glob(f"{bridge}*")),
        "control group": list(Path("/sys/fs/cgroup").glob(f"**/{bridge}")),
        "files": [directory] if os.path.lexists(directory) else [],
    }
    return [f"{kind}: {found}" for kind, all_found in places.items() for found in all_found]
