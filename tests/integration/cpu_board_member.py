"""Another worker process of the host, with a seat on the CPU board."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.worker.cpu.board import CpuBoardEntry

LIMIT_S = 30.0

_GUEST = """
import sys
from pathlib import Path
from services.worker.cpu.board import CpuBoard

board = CpuBoard(Path(sys.argv[1]))
print(board.take_entry(sys.argv[2], sys.argv[3]).index, flush=True)
for line in sys.stdin:
    board.set_backlog(int(line))
    print("done", flush=True)
board.leave()
"""


class Guest:
    """Has a seat from its construction until it leaves or is killed."""

    def __init__(self, cpu_board: Path, role: str, worker_id: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _GUEST, str(cpu_board), role, worker_id],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.entry = CpuBoardEntry(worker_id, role, int(self._read()))

    def set_backlog(self, num_sequences: int) -> None:
        assert self._process.stdin is not None
        print(num_sequences, file=self._process.stdin, flush=True)
        self._read()

    def leave(self) -> None:
        self._process.communicate(timeout=LIMIT_S)

    def kill(self) -> None:
        """Send SIGKILL, and wait until the process is gone."""
        self._process.kill()
        self._process.communicate(timeout=LIMIT_S)

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


@contextmanager
def guest(cpu_board: Path, role: str, worker_id: str) -> Iterator[Guest]:
    member = Guest(cpu_board, role, worker_id)
    try:
        yield member
    finally:
        member.kill()
