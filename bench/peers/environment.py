"""A peer's virtual environment: pinned packages in `.venvs/<name>`, apart from Quire's own.

A file records what was installed; an environment whose record equals its specification is left as
it is. `pip` finds packages as it is configured to on this machine.
"""

import json
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIRECTORY = ROOT / ".venvs"


@dataclass(frozen=True, slots=True)
class Environment:
    """`unwanted` are dependencies that `requirements` pull in and that break the peer on a CPU."""

    name: str
    requirements: tuple[str, ...]
    unwanted: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        return DIRECTORY / self.name

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    @property
    def is_ready(self) -> bool:
        return self._record.exists() and self._record.read_text() == self._specification

    @property
    def _record(self) -> Path:
        return self.path / "installed.json"

    @property
    def _specification(self) -> str:
        return json.dumps(asdict(self))

    def create(self) -> None:
        """Make it anew, unless it is as specified. CalledProcessError: pip failed."""
        if self.is_ready:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        run(sys.executable, "-m", "venv", str(self.path))
        run(str(self.python), "-m", "pip", "install", "--quiet", *self.requirements)
        if self.unwanted:
            run(str(self.python), "-m", "pip", "uninstall", "--quiet", "--yes", *self.unwanted)
        self._record.write_text(self._specification)


def run(*command: str, cwd: Path | None = None) -> None:
    """Run a step of a set-up, whose output goes to the terminal. CalledProcessError: it failed."""
    subprocess.run(command, cwd=cwd, check=True)
