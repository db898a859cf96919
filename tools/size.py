"""Counts the lines of each room of the repository and holds them against their budgets.

    python tools/size.py          # the table; exit status 1 if a room is above its budget

A line is a line of a tracked Python, C++, Lua, JavaScript or proto file (and of Markdown in
`docs`), as `wc -l` counts it. Generated stubs are left out. `tools/size.toml` holds the budgets: a
change that raises one says why in its commit.
"""

import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUDGETS = ROOT / "tools/size.toml"
CODE = frozenset({".py", ".cpp", ".h", ".lua", ".js", ".proto"})
GENERATED = ("quire/v1/",)


@dataclass(frozen=True, slots=True)
class Room:
    """A part of the tree that has a budget."""

    name: str
    paths: tuple[str, ...]
    """The prefixes of the paths of its files, relative to the root of the repository."""
    budget: int
    suffixes: frozenset[str] = CODE

    def holds(self, file: str) -> bool:
        return file.startswith(self.paths) and Path(file).suffix in self.suffixes

    def lines(self, files: list[str]) -> int:
        return sum((ROOT / file).read_bytes().count(b"\n") for file in files if self.holds(file))


def rooms(path: Path = BUDGETS) -> list[Room]:
    """The rooms that the file lists, in its order."""
    return [
        Room(
            name,
            tuple(room["paths"]),
            room["budget"],
            frozenset(room["suffixes"]) if "suffixes" in room else CODE,
        )
        for name, room in tomllib.loads(path.read_text()).items()
    ]


def tracked_files() -> list[str]:
    """The paths of the files that git tracks and that exist, without generated ones."""
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    files = [file for file in listing.split("\0") if file and not file.startswith(GENERATED)]
    return [file for file in files if (ROOT / file).is_file()]


def main() -> int:
    files = tracked_files()
    above = 0
    for room in rooms():
        lines = room.lines(files)
        is_above = lines > room.budget
        above += is_above
        note = f"  {lines - room.budget:,} above its budget" if is_above else ""
        print(f"{room.name:28}{lines:>9,}{room.budget:>9,}{note}")
    if above:
        print(f"{above} rooms are above their budgets (tools/size.toml)", file=sys.stderr)
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
