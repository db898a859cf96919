"""Measures the memory that is available on this host, in its cgroups and in a file system."""

import os
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_PROC = Path("/proc")


def available_bytes(root: Path, proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """The bytes that a file under `root` (a tmpfs) may take: the least of the file system's free
    space, the host's MemAvailable, and the rest of each cgroup's limit above this process."""
    disk = os.statvfs(root)
    return min(
        disk.f_bavail * disk.f_frsize, _host_available(proc), *_cgroups_available(proc, cgroups)
    )


def _host_available(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        name, value = line.split(":")
        if name == "MemAvailable":
            return int(value.removesuffix("kB")) * 1024
    raise ValueError(f"{proc}/meminfo has no MemAvailable")


def _cgroups_available(proc: Path, cgroups: Path) -> Iterator[int]:
    """For each cgroup: its limit minus its working set, without page cache that can be dropped."""
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            yield from _remaining(cgroups, name, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            # cgroups version 1 have one mount per controller.
            files = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            yield from _remaining(cgroups / "memory", name, *files)


def _remaining(mount: Path, name: str, limit: str, usage: str, droppable: str) -> Iterator[int]:
    """The rest of each limit from the process's cgroup up to the mount's root. In a container the
    mount's root is the container's own cgroup, and the path in /proc does not exist below it."""
    group = mount / name.strip("/")
    for directory in (group, *group.parents):
        max_bytes = _read(directory / limit)
        if max_bytes is not None and max_bytes != "max":
            used = int(_read(directory / usage) or 0) - _statistic(directory, droppable)
            yield max(0, int(max_bytes) - max(0, used))
        if directory == mount:
            return


def _statistic(directory: Path, name: str) -> int:
    for line in (_read(directory / "memory.stat") or "").splitlines():
        key, value = line.split()
        if key == name:
            return int(value)
    return 0


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
