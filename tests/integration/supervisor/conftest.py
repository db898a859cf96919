"""The runs of a test, which end with it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .toy_run import Run


@pytest.fixture
def start(short_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(**options: object) -> Run:
        runs.append(Run(short_path / "runs", **options))  # type: ignore[arg-type]
        return runs[-1]

    yield start
    for run in runs:
        run.process.kill()
        run.process.wait()
