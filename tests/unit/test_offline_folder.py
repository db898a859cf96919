"""Directories of offline deployments: that of a killed process does not keep its memory."""

import subprocess
import sys
from pathlib import Path

from services.offline.folder import locked_folder

PROGRAM = """
import sys
from pathlib import Path
from services.offline.folder import locked_folder
with locked_folder(Path(sys.argv[1])) as folder:
    (folder / "pool").mkdir()
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_folder_of_a_killed_process_is_removed_and_that_of_a_living_one_kept(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        with locked_folder(tmp_path) as folder:
            assert theirs.exists()
            assert folder != theirs
        assert not folder.exists()
        other.kill()
        other.wait()
    assert theirs.exists()
    with locked_folder(tmp_path):
        assert not theirs.exists()


def test_other_directories_are_kept(tmp_path: Path) -> None:
    (tmp_path / "quire-0").mkdir()
    with locked_folder(tmp_path):
        pass
    assert [each.name for each in tmp_path.iterdir()] == ["quire-0"]
