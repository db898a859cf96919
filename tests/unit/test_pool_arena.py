"""A pool's files: their front is allocated at creation, the rest while they are used."""

import mmap
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.pool import arena
from services.pool.arena import complete_file, make_file, missing_bytes
from services.runtime.errors import StartupError

PAGE = mmap.PAGESIZE
SIZE = 11 * PAGE + 100


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "FIRST_BYTES", 3 * PAGE)
    monkeypatch.setattr(arena, "_PIECE_BYTES", 2 * PAGE)


@pytest.fixture
def path() -> Iterator[Path]:
    """In a real tmpfs."""
    path = Path(f"/dev/shm/quire-test-{secrets.token_hex(4)}")
    yield path
    path.unlink(missing_ok=True)


def never() -> bool:
    return False


def after(num_pieces: int) -> Callable[[], bool]:
    """Stop once so many pieces are allocated."""
    answers = iter([False] * num_pieces + [True])
    return lambda: next(answers)


def num_pages(path: Path) -> int:
    """The number of allocated pages."""
    return path.stat().st_blocks * 512 // PAGE


def test_the_front_is_allocated_at_once_and_the_file_is_private(path: Path) -> None:
    make_file(path, SIZE)
    status = path.stat()
    assert (status.st_size, status.st_mode & 0o777) == (SIZE, 0o600)
    assert num_pages(path) == 3
    assert missing_bytes(path) == 8 * PAGE + 100


def test_short_writes_are_complete(path: Path) -> None:
    make_file(path, 2 * PAGE + 1)
    assert (num_pages(path), missing_bytes(path)) == (3, 0)
    complete_file(path, never)
    assert path.stat().st_size == 2 * PAGE + 1


def test_the_rest_is_allocated_from_front_to_back(path: Path) -> None:
    make_file(path, SIZE)
    complete_file(path, after(2))
    assert num_pages(path) == 3 + 2 * 2
    complete_file(path, never)
    assert (num_pages(path), missing_bytes(path)) == (12, 0)
    assert path.stat().st_size == SIZE


def test_a_second_process_continues_and_loses_no_write(path: Path) -> None:
    make_file(path, SIZE)
    complete_file(path, after(1))
    with path.open("r+b") as file:
        for page in (0, 4, 10):  # allocated by make_file, by the first, and by this write
            file.seek(page * PAGE)
            file.write(b"KV")
    complete_file(path, never)
    contents = path.read_bytes()
    assert num_pages(path) == 12
    assert [contents[page * PAGE :][:2] for page in (0, 4, 10)] == [b"KV"] * 3
    assert contents.count(0) == SIZE - 6


def test_a_file_larger_than_its_file_system_is_refused_with_the_numbers(path: Path) -> None:
    with pytest.raises(StartupError, match=r"1048576\.00 TiB .*No space left.* free"):
        make_file(path, 1 << 60)
    assert not path.exists()


def test_memory_that_went_meanwhile_is_an_error_with_the_numbers(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if others had filled the file system after the file was made: a piece does not fit."""
    path.touch()
    with path.open("r+b") as file:
        file.truncate(1 << 60)
    monkeypatch.setattr(arena, "_PIECE_BYTES", 1 << 59)
    with pytest.raises(StartupError, match=r"1048576\.00 TiB .*No space left.* free"):
        complete_file(path, never)
    assert num_pages(path) == 0
