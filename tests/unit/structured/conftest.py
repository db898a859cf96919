from pathlib import Path

import pytest

from bench.make_checkpoint import CheckpointSpec, make_checkpoint
from tests.forms import Forms


@pytest.fixture(scope="package")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Forms:
    return Forms(Path(make_checkpoint(tmp_path_factory.mktemp("tiny"), CheckpointSpec())))
