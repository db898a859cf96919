"""The table of lines and budgets."""

from pathlib import Path

from tools.size import CODE, Room, rooms, tracked_files


def test_every_file_of_code_belongs_to_a_room() -> None:
    """Lines outside all rooms would grow without a budget; `deploy` holds a few short scripts."""
    known = rooms()
    outside = [
        file
        for file in tracked_files()
        if Path(file).suffix in CODE
        and not file.startswith("deploy/")
        and not any(room.holds(file) for room in known)
    ]
    assert outside == []


def test_room_counts_the_lines_of_its_own_files_alone() -> None:
    file = "tests/unit/test_size.py"
    room = Room("tests of sizes", ("tests/unit/test_size",), budget=1)
    others = ["tests/unit/test_sizes.md", "tools/size.py"]
    assert room.lines([file, *others]) == len(Path(__file__).read_text().splitlines())
