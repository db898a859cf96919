"""The board of a host's workers, between real processes: who has a seat, and who is busy."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.board import NUM_SEATS, SEAT_BYTES, Board, Seat
from services.common.errors import StartupError

from .board_guest import guest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "board"


@pytest.fixture
def board(path: Path) -> Iterator[Board]:
    board = Board(path)
    yield board
    board.leave()


def test_a_new_board_is_empty(board: Board, path: Path) -> None:
    assert board.seats() == ()
    assert path.stat().st_size == NUM_SEATS * SEAT_BYTES == 16_384
    assert path.stat().st_mode & 0o777 == 0o600


def test_seats_are_seen_by_every_process_in_the_order_of_names(board: Board, path: Path) -> None:
    with guest(path, "prefill", "prefill-7") as first, guest(path, "decode", "decode-2") as second:
        own = board.sit_down("decode", "decode-1")
        assert [first.seat.index, second.seat.index, own.index] == [0, 1, 2]
        assert board.seats() == (own, second.seat, first.seat)


def test_a_worker_that_leaves_is_gone_and_its_seat_is_free(board: Board, path: Path) -> None:
    with guest(path, "prefill", "a") as other:
        other.set_backlog(1)
        other.leave()
        assert board.seats() == ()
        assert board.backlog(other.seat) == 0
    assert board.sit_down("decode", "b").index == 0


def test_a_killed_workers_seat_is_free_at_once(board: Board, path: Path) -> None:
    """And nobody waits for a CPU that it was busy on."""
    with guest(path, "prefill", "dead") as dead, guest(path, "decode", "alive") as alive:
        dead.set_backlog(1)
        assert board.seats() == (alive.seat, dead.seat)
        assert board.backlog(dead.seat) == 1
        dead.kill()
        assert board.seats() == (alive.seat,)
        assert board.backlog(dead.seat) == 0
    assert board.sit_down("decode", "next").index == dead.seat.index


def test_a_killed_workers_seat_can_be_taken_before_anybody_has_looked(
    board: Board, path: Path
) -> None:
    with guest(path, "prefill", "a worker with a long name") as dead:
        dead.set_backlog(1)
        dead.kill()
        own = board.sit_down("decode", "b")
    assert own == Seat("b", "decode", 0)
    assert board.seats() == (own,)
    assert board.backlog(own) == 0


def test_who_looks_drops_nobodys_seat(board: Board, path: Path) -> None:
    """Looking locks the seats of the dead, for a moment, and lets go of nothing else."""
    own = board.sit_down("decode", "own")
    for _ in range(3):
        assert board.seats() == (own,)
    with guest(path, "prefill", "other") as other:
        assert other.seat.index != own.index
        assert board.seats() == (other.seat, own)


def test_a_backlog_is_of_the_own_seat_alone(board: Board, path: Path) -> None:
    with guest(path, "prefill", "other") as other:
        own = board.sit_down("decode", "own")
        board.set_backlog(1)
        assert (board.backlog(own), board.backlog(other.seat)) == (1, 0)
        other.set_backlog(70_000)
        board.set_backlog(0)
        assert (board.backlog(own), board.backlog(other.seat)) == (0, 70_000)


def test_who_has_no_seat_wants_nothing(board: Board) -> None:
    before = bytes(board.memory)
    board.set_backlog(1)
    assert bytes(board.memory) == before


def test_leaving_twice_is_leaving_once(board: Board, path: Path) -> None:
    board.sit_down("decode", "a")
    board.set_backlog(1)
    board.leave()
    board.leave()
    board.set_backlog(1)
    assert path.read_bytes() == bytes(NUM_SEATS * SEAT_BYTES)


def test_when_all_seats_are_taken_it_says_so(
    board: Board, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a smaller board: the other processes sit on all of it."""
    monkeypatch.setattr("services.common.board.NUM_SEATS", 2)
    with guest(path, "prefill", "a"), guest(path, "decode", "b") as last:
        with pytest.raises(StartupError, match="all 2 seats of this host's workers are taken"):
            board.sit_down("decode", "c")
        last.kill()
        assert board.sit_down("decode", "c").index == 1


def test_a_name_of_any_length_fits(board: Board, path: Path) -> None:
    """What is too long is cut, and does not run into the next seat."""
    with guest(path, "prefill", "ü" * 100), guest(path, "decode", "next") as after:
        first, second = board.seats()
        assert (first.role, first.worker_id) == ("decode", "next")
        assert second.role == "prefill"
        assert second.worker_id.startswith("ü" * 20)
        assert after.seat.index == second.index + 1


def test_a_board_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Board(tmp_path / "nowhere" / "board")
