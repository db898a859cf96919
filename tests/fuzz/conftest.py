"""One deployment for the tests of a file that send anything to it."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.deployment import Deployment, deployed


@pytest.fixture
def service(tmp_path: Path) -> Iterator[tuple[asyncio.Runner, Deployment]]:
    with deployed(tmp_path) as running:
        yield running
