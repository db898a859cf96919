"""Print what pyproject.toml requires, one requirement a line, so that an image has its dependencies
in a layer that no other change to the project makes anew.

usage: requirements.py build | project | EXTRA
"""

import re
import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, what: str) -> list[str]:
    """`build`: of the build; `project`: of the package; else of the extra with that name, and of
    the extras that it names."""
    data = tomllib.loads(pyproject.read_text())
    if what == "build":
        return list(data["build-system"]["requires"])
    if what == "project":
        return list(data["project"]["dependencies"])
    found = []
    for line in data["project"]["optional-dependencies"][what]:
        own = re.fullmatch(rf"{data['project']['name']}\[(.+)\]", line)
        extras = own[1].split(",") if own else []
        found += [one for extra in extras for one in requirements(pyproject, extra)] or [line]
    return found


if __name__ == "__main__":
    print("\n".join(requirements(Path(__file__).parents[1] / "pyproject.toml", sys.argv[1])))
