"""Files of packed weights: made once, shared, and rejected when anything about them is wrong."""

import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from services.engine.weights.packed_file import Contents, Facts, PackedFile, packed_file
from services.runtime.errors import StartupError

SIZES = {"first": 5000, "empty": 0, "second": 64}
FACTS = {"made_of": "rice"}
LIMIT_S = 30.0


class CountingFile:
    """Opens a file, and counts how often it was made."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_made = 0

    def open(self, facts: Facts = FACTS) -> PackedFile:
        def make() -> tuple[Facts, Mapping[str, int], Contents]:
            self.num_made += 1
            return facts, SIZES, pieces

        return packed_file(self.path, lambda found: found == facts, make, proceed)

    @property
    def files(self) -> list[str]:
        return sorted(path.name for path in self.path.parent.iterdir())


def proceed() -> None:
    """Progress without a reason to stop."""


def pieces(name: str) -> Iterator[Tensor]:
    """Pieces in one memory, one after another."""
    memory = torch.empty(1999, dtype=torch.uint8)
    for begin in range(0, SIZES[name], 1999):
        piece = contents(name)[begin : begin + 1999]
        memory[: len(piece)] = piece
        yield memory[: len(piece)]
        memory.fill_(99)


def contents(name: str) -> Tensor:
    return (torch.arange(SIZES[name]) * (3 if name == "first" else 5) % 251).byte()


@pytest.fixture
def counting_file(tmp_path: Path) -> CountingFile:
    return CountingFile(tmp_path / "cache" / "qwen3-0.6b")


def test_a_file_holds_what_was_written(counting_file: CountingFile) -> None:
    found = counting_file.open()
    assert found.facts == FACTS
    assert found.sections.keys() == SIZES.keys()
    assert all(torch.equal(found.sections[name], contents(name)) for name in SIZES)
    assert found.sections["first"].data_ptr() % 4096 == found.sections["second"].data_ptr() % 4096
    assert found.sections["first"].data_ptr() % 4096 == 0
    assert counting_file.files == ["qwen3-0.6b", "qwen3-0.6b.lock"]
    assert counting_file.path.stat().st_size == 4 * 4096  # the header, 5000 bytes on two pages, 64
    assert counting_file.path.parent.stat().st_mode & 0o777 == 0o700


def test_files_that_nobody_uses_go_when_a_new_one_is_made(counting_file: CountingFile) -> None:
    cache = counting_file.path.parent
    used, unused = CountingFile(cache / "used"), CountingFile(cache / "unused")
    for each in (used, unused):
        each.open()
        os.utime(each.path, (0, 0))
    used.open()
    (cache / "notes.txt").write_text("not ours")
    os.utime(cache / "notes.txt", (0, 0))
    counting_file.open()
    assert [name for name in counting_file.files if not name.endswith(".lock")] == [
        *("notes.txt", "qwen3-0.6b", "used")
    ]


def test_the_least_recently_used_files_go_if_the_disk_has_no_room(
    counting_file: CountingFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = counting_file.path.parent
    for age_s, name in enumerate(("newer", "older", "oldest")):
        file = CountingFile(cache / name)
        file.open()
        os.utime(file.path, (time.time() - age_s - 1, time.time() - age_s - 1))

    def usage(_path: Path) -> Any:
        """Each file that has gone left 6,000 bytes; twice 5,064 are needed."""
        gone = [name for name in ("newer", "older", "oldest") if not (cache / name).exists()]
        return SimpleNamespace(free=6000 * len(gone))

    monkeypatch.setattr(shutil, "disk_usage", usage)
    counting_file.open()
    assert (cache / "newer").exists()
    assert not (cache / "older").exists()
    assert not (cache / "oldest").exists()


def test_a_file_is_made_once(counting_file: CountingFile) -> None:
    first = counting_file.open()
    before = counting_file.path.stat()
    second = counting_file.open()
    assert counting_file.num_made == 1
    assert counting_file.path.stat().st_ino == before.st_ino
    assert all(torch.equal(first.sections[name], second.sections[name]) for name in SIZES)


def test_a_file_of_something_else_is_made_again(counting_file: CountingFile) -> None:
    """A process that has mapped the old file keeps it."""
    old = counting_file.open()
    assert counting_file.open({"made_of": "wheat"}).facts == {"made_of": "wheat"}
    assert counting_file.num_made == 2
    assert torch.equal(old.sections["first"], contents("first"))


@pytest.mark.parametrize("size", [0, 7, 8, 16, 23, 24, 100, 4096, 12_288, -1])
def test_a_truncated_file_is_made_again(counting_file: CountingFile, size: int) -> None:
    counting_file.open()
    whole = counting_file.path.read_bytes()
    counting_file.path.write_bytes(whole[:size])
    counting_file.open()
    assert counting_file.num_made == 2
    assert counting_file.path.read_bytes() == whole


def test_a_file_with_any_byte_flipped_is_made_again(counting_file: CountingFile) -> None:
    """All bytes of magic, digest, length and header, and some of the padding and the sections."""
    counting_file.open()
    whole = counting_file.path.read_bytes()
    places = [*range(160), 4095, 4096, 4097, 9095, 9096, 12_288, 12_351, len(whole) - 1]
    for place in places:
        flipped = bytearray(whole)
        flipped[place] ^= 1
        counting_file.path.write_bytes(flipped)
        assert torch.equal(counting_file.open().sections["first"], contents("first"))
    assert counting_file.num_made == 1 + len(places)
    assert counting_file.path.read_bytes() == whole


def test_facts_may_be_longer_than_a_page(counting_file: CountingFile) -> None:
    facts = {"made_of": "rice" * 5000}
    assert counting_file.open(facts).facts == facts
    assert torch.equal(counting_file.open(facts).sections["first"], contents("first"))
    assert counting_file.num_made == 1


def test_two_files_of_one_stem_are_two(counting_file: CountingFile) -> None:
    """Names of models have dots in them, which are no suffixes."""
    counting_file.open()
    other = CountingFile(counting_file.path.with_name("qwen3-0.7b"))
    other.open()
    assert counting_file.files == ["qwen3-0.6b", "qwen3-0.6b.lock", "qwen3-0.7b", "qwen3-0.7b.lock"]


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_without_room_nothing_is_left(counting_file: CountingFile) -> None:
    with file_size_limit(8192), pytest.raises(StartupError) as error:
        counting_file.open()
    assert str(error.value) == f"packed weights {counting_file.path}: File too large"
    assert counting_file.files == ["qwen3-0.6b.lock"]


def test_without_room_the_old_file_stays(counting_file: CountingFile) -> None:
    counting_file.open()
    with file_size_limit(8192), pytest.raises(StartupError):
        counting_file.open({"made_of": "wheat"})
    counting_file.open()
    assert counting_file.num_made == 2
    assert counting_file.files == ["qwen3-0.6b", "qwen3-0.6b.lock"]


def test_without_the_right_to_write_it_says_where() -> None:
    """In a place where not even root can make directories."""
    counting_file = CountingFile(Path("/sys/quire/qwen3-0.6b"))
    with pytest.raises(StartupError, match=r"^packed weights /sys/quire/qwen3-0\.6b: \w+"):
        counting_file.open()
    assert counting_file.num_made == 0


def fail(name: str) -> Iterator[Tensor]:
    yield contents(name)[:1]
    raise ZeroDivisionError


def spill(name: str) -> Iterator[Tensor]:
    yield contents(name)
    yield torch.zeros(1, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("filling", "error"),
    [(fail, ZeroDivisionError), (spill, ValueError)],
    ids=["fails", "too long"],
)
def test_a_failure_to_fill_leaves_nothing(
    counting_file: CountingFile, filling: Contents, error: type[Exception]
) -> None:
    with pytest.raises(error):
        packed_file(
            counting_file.path, lambda facts: True, lambda: (FACTS, SIZES, filling), proceed
        )
    assert counting_file.files == ["qwen3-0.6b.lock"]


class Stop(Exception):
    pass


def stop() -> None:
    raise Stop


def test_a_stopping_process_reads_no_further(counting_file: CountingFile) -> None:
    counting_file.open()
    with pytest.raises(Stop):
        packed_file(counting_file.path, lambda facts: True, lambda: (FACTS, SIZES, pieces), stop)
    assert counting_file.files == ["qwen3-0.6b", "qwen3-0.6b.lock"]


def test_a_stopping_process_does_not_wait_for_another(tmp_path: Path) -> None:
    path = tmp_path / "packed"
    with start_writer(path) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "filling\n"
        with pytest.raises(Stop):
            packed_file(path, lambda facts: True, lambda: (FACTS, SIZES, pieces), stop)
        assert first.communicate("go\n", LIMIT_S)[0] == "700\n"


WRITER = """
import sys
from pathlib import Path
import torch
from services.engine.weights.packed_file import packed_file

def only(name):
    print("filling", flush=True)
    sys.stdin.readline()
    yield torch.full((100,), 7, dtype=torch.uint8)

make = lambda: ({}, {"only": 100}, only)
waits = lambda: print("waiting", file=sys.stderr, flush=True)
found = packed_file(Path(sys.argv[1]), lambda facts: True, make, waits)
print(sum(found.sections["only"].tolist()), flush=True)
"""


def start_writer(path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(path)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_one_of_two_processes_makes_a_file_and_the_other_waits(tmp_path: Path) -> None:
    path = tmp_path / "packed"
    with start_writer(path) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "filling\n"
        with start_writer(path) as second:
            assert second.stderr is not None
            assert second.stderr.readline() == "waiting\n"
            assert not path.exists()
            assert first.communicate("go\n", LIMIT_S)[0] == "700\n"
            assert second.communicate("", LIMIT_S)[0] == "700\n"


def test_a_process_killed_while_packing_blocks_no_other(tmp_path: Path) -> None:
    counting_file = CountingFile(tmp_path / "packed")
    with start_writer(counting_file.path) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "filling\n"
        first.kill()
    assert counting_file.files == ["packed.lock", "packed.part"]
    counting_file.open()
    assert counting_file.num_made == 1
    assert counting_file.files == ["packed", "packed.lock"]
