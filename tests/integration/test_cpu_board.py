"""The CPU board of a host's workers, between real processes: their entries, and whether they are
busy."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from services.runtime.errors import StartupError
from services.worker.cpu.board import ENTRY_BYTES, NUM_ENTRIES, CpuBoard, CpuBoardEntry

from .cpu_board_member import guest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "board"


@pytest.fixture
def cpu_board(path: Path) -> Iterator[CpuBoard]:
    cpu_board = CpuBoard(path)
    yield cpu_board
    cpu_board.leave()


def test_a_new_board_is_empty(cpu_board: CpuBoard, path: Path) -> None:
    assert cpu_board.entries() == ()
    assert path.stat().st_size == NUM_ENTRIES * ENTRY_BYTES == 16_384
    assert path.stat().st_mode & 0o777 == 0o600


def test_entries_are_read_by_every_process_in_the_order_of_names(
    cpu_board: CpuBoard, path: Path
) -> None:
    with guest(path, "prefill", "prefill-7") as first, guest(path, "decode", "decode-2") as second:
        own = cpu_board.take_entry("decode", "decode-1")
        assert [first.entry.index, second.entry.index, own.index] == [0, 1, 2]
        assert cpu_board.entries() == (own, second.entry, first.entry)


def test_the_entry_of_a_worker_that_left_is_free(cpu_board: CpuBoard, path: Path) -> None:
    with guest(path, "prefill", "a") as other:
        other.set_backlog(1)
        other.leave()
        assert cpu_board.entries() == ()
        assert cpu_board.backlog(other.entry) == 0
    assert cpu_board.take_entry("decode", "b").index == 0


def test_the_entry_of_a_killed_worker_is_free_at_once(cpu_board: CpuBoard, path: Path) -> None:
    """No worker waits for a CPU on which it was busy."""
    with guest(path, "prefill", "dead") as dead, guest(path, "decode", "alive") as alive:
        dead.set_backlog(1)
        assert cpu_board.entries() == (alive.entry, dead.entry)
        assert cpu_board.backlog(dead.entry) == 1
        dead.kill()
        assert cpu_board.entries() == (alive.entry,)
        assert cpu_board.backlog(dead.entry) == 0
    assert cpu_board.take_entry("decode", "next").index == dead.entry.index


def test_the_entry_of_a_killed_worker_can_be_taken_before_a_read(
    cpu_board: CpuBoard, path: Path
) -> None:
    with guest(path, "prefill", "a worker with a long name") as dead:
        dead.set_backlog(1)
        dead.kill()
        own = cpu_board.take_entry("decode", "b")
    assert own == CpuBoardEntry("b", "decode", 0)
    assert cpu_board.entries() == (own,)
    assert cpu_board.backlog(own) == 0


def test_reading_the_board_frees_no_entry(cpu_board: CpuBoard, path: Path) -> None:
    """Reading locks the entries of dead workers for a moment, and releases nothing else."""
    own = cpu_board.take_entry("decode", "own")
    for _ in range(3):
        assert cpu_board.entries() == (own,)
    with guest(path, "prefill", "other") as other:
        assert other.entry.index != own.index
        assert cpu_board.entries() == (other.entry, own)


def test_a_worker_writes_the_backlog_of_its_own_entry_only(cpu_board: CpuBoard, path: Path) -> None:
    with guest(path, "prefill", "other") as other:
        own = cpu_board.take_entry("decode", "own")
        cpu_board.set_backlog(1)
        assert (cpu_board.backlog(own), cpu_board.backlog(other.entry)) == (1, 0)
        other.set_backlog(70_000)
        cpu_board.set_backlog(0)
        assert (cpu_board.backlog(own), cpu_board.backlog(other.entry)) == (0, 70_000)


def test_a_worker_without_an_entry_has_no_backlog(cpu_board: CpuBoard) -> None:
    before = bytes(cpu_board.memory)
    cpu_board.set_backlog(1)
    assert bytes(cpu_board.memory) == before


def test_leaving_twice_is_leaving_once(cpu_board: CpuBoard, path: Path) -> None:
    cpu_board.take_entry("decode", "a")
    cpu_board.set_backlog(1)
    cpu_board.leave()
    cpu_board.leave()
    cpu_board.set_backlog(1)
    assert path.read_bytes() == bytes(NUM_ENTRIES * ENTRY_BYTES)


def test_a_full_board_is_an_error(
    cpu_board: CpuBoard, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a smaller board, whose entries are all taken by other processes."""
    monkeypatch.setattr("services.worker.cpu.board.NUM_ENTRIES", 2)
    with guest(path, "prefill", "a"), guest(path, "decode", "b") as last:
        with pytest.raises(StartupError, match="already has 2 workers"):
            cpu_board.take_entry("decode", "c")
        last.kill()
        assert cpu_board.take_entry("decode", "c").index == 1


def test_a_name_of_any_length_fits(cpu_board: CpuBoard, path: Path) -> None:
    """A long name is cut, and does not overwrite the next entry."""
    with guest(path, "prefill", "ü" * 100), guest(path, "decode", "next") as after:
        first, second = cpu_board.entries()
        assert (first.role, first.worker_id) == ("decode", "next")
        assert second.role == "prefill"
        assert second.worker_id.startswith("ü" * 20)
        assert after.entry.index == second.index + 1


def test_a_worker_chooses_its_nodes_by_those_of_the_others(cpu_board: CpuBoard, path: Path) -> None:
    seen: list[tuple[CpuBoardEntry, ...]] = []

    def choose(entries: Sequence[CpuBoardEntry]) -> tuple[int, ...]:
        seen.append(tuple(entries))
        return (2, 3)

    with guest(path, "prefill", "a") as other:
        own = cpu_board.take_entry("decode", "b", choose)
        assert seen == [(other.entry,)]
        assert (other.entry.nodes, own.nodes) == ((0,), (2, 3))
        assert cpu_board.entries() == (other.entry, own)
    # as other processes read it
    assert path.read_bytes()[ENTRY_BYTES + 4 :].startswith(b"decode 2-3 b\0")


def test_an_entry_that_is_half_written_does_not_count_yet(cpu_board: CpuBoard, path: Path) -> None:
    with guest(path, "decode", "a") as other:
        for half in (b"dec", b"decode ", b"decode 0-"):
            cpu_board.memory[4:ENTRY_BYTES] = half.ljust(ENTRY_BYTES - 4, b"\0")
            assert cpu_board.entries() == ()
        cpu_board.memory[4:ENTRY_BYTES] = b"decode 0 a".ljust(ENTRY_BYTES - 4, b"\0")
        assert cpu_board.entries() == (other.entry,)


def test_a_board_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        CpuBoard(tmp_path / "nowhere" / "board")
