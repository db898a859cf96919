"""Sizing: bytes in users' notation, the host's memory, and the number of blocks."""

import os
from pathlib import Path

import pytest

from quire.sizes import parse_size
from services.pool.memory import available_bytes
from services.pool.sizing import MemoryPlan, check_capacity, format_size, num_blocks_for
from services.runtime.errors import StartupError

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("2GiB", 2 << 30),
        ("1.5 GiB", 3 << 29),
        (" 512MiB ", 512 << 20),
        ("64KiB", 65536),
        ("1TiB", 1 << 40),
        ("3GB", 3_000_000_000),
        ("7kB", 7000),
        ("4096", 4096),
        ("10B", 10),
    ],
)
def test_sizes_as_users_write_them(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "2G", "-1GiB", "1,5GiB", "2gib", "1e9", "2 GiB x"])
def test_invalid_sizes_are_refused_with_the_units(text: str) -> None:
    with pytest.raises(ValueError, match="KiB, MiB, GiB"):
        parse_size(text)


def test_sizes_are_shown_readably_and_exactly() -> None:
    assert format_size(3 << 29) == "1.50 GiB (1610612736 bytes)"
    assert format_size(100) == "100 bytes"


def test_given_memory_is_divided_into_blocks() -> None:
    assert num_blocks_for(MemoryPlan(pool_bytes=1000), 90, available=1000) == 11


def test_given_memory_that_is_not_there_is_an_error_with_the_numbers() -> None:
    with pytest.raises(StartupError, match=r"2\.00 GiB .* 1\.00 GiB .* left"):
        num_blocks_for(MemoryPlan(pool_bytes=2 * GIB), 4096, available=GIB)


def test_measured_memory_is_half_of_what_all_workers_leave() -> None:
    """1000 are available. Two workers are still to start with 100 of weights each, and three use 50
    for activations: 650 are left, half of them in blocks of 30."""
    plan = MemoryPlan(None, num_expected_workers=3, weight_bytes=100, activation_bytes=50)
    assert num_blocks_for(plan, 30, available=1000) == 10


@pytest.mark.parametrize("available", [0, 100, 799])
def test_too_few_blocks_are_an_error_with_the_numbers(available: int) -> None:
    with pytest.raises(
        StartupError, match=rf"at least 4 blocks of 100 bytes.*{available} bytes are"
    ):
        num_blocks_for(MemoryPlan(None), 100, available)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A /proc and a /sys/fs/cgroup of a host with 1 MiB (less than any file system that tests run
    on)."""
    write(tmp_path / "proc/meminfo", "MemTotal: 2048 kB\nMemAvailable: 1024 kB\nSwapFree: 0 kB\n")
    write(tmp_path / "proc/self/cgroup", "0::/\n")
    (tmp_path / "cgroup").mkdir()
    return tmp_path


def measure(host: Path) -> int:
    return available_bytes(host, host / "proc", host / "cgroup")


def test_without_limits_the_host_decides(host: Path) -> None:
    assert measure(host) == 1 << 20


def test_the_file_system_decides_when_it_has_least(host: Path) -> None:
    write(host / "proc/meminfo", f"MemAvailable: {1 << 50} kB\n")
    assert 0 < measure(host) < 1 << 50


def test_a_cgroup_limit_counts_without_the_cache_that_can_go(host: Path) -> None:
    write(host / "cgroup/memory.max", "500000\n")
    write(host / "cgroup/memory.current", "300000\n")
    write(host / "cgroup/memory.stat", "anon 1\ninactive_file 100000\n")
    assert measure(host) == 300_000


def test_the_tightest_cgroup_on_the_way_up_decides(host: Path) -> None:
    write(host / "proc/self/cgroup", "0::/slice/service\n")
    for name, limit in [("slice/service", "max"), ("slice", "70000")]:
        write(host / "cgroup" / name / "memory.max", limit)
        write(host / "cgroup" / name / "memory.current", "20000")
    assert measure(host) == 50_000


def test_in_a_container_the_mounts_root_is_its_own_cgroup(host: Path) -> None:
    write(host / "proc/self/cgroup", "5:cpu,cpuacct:/docker/1\n4:memory:/docker/1\n0::/\n")
    write(host / "cgroup/memory/memory.limit_in_bytes", "90000")
    write(host / "cgroup/memory/memory.usage_in_bytes", "100000")
    write(host / "cgroup/memory/memory.stat", "total_inactive_file 30000\n")
    assert measure(host) == 20_000


def test_file_system_capacity_counts_existing_pools(tmp_path: Path) -> None:
    """So a check beside running workers has the same result as one before them."""
    size = os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
    check_capacity(1 << 20, tmp_path)
    with pytest.raises(StartupError, match=r"are .* together: .* can hold .* on this host"):
        check_capacity(2 * size + (1 << 60), tmp_path)


def test_a_root_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="nowhere, where pools are to be: No such file"):
        check_capacity(1, tmp_path / "nowhere")
