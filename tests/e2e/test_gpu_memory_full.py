"""The tests of crashes, lost ledgers and swaps, on a pool that is kept like a GPU's."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from . import test_swap
from .deployment import Deployment, serving
from .test_crashes import (
    inside,
    test_a_killed_process_is_a_pause_and_no_more,
    test_writes_of_a_stopped_worker_reach_no_reader,
)
from .test_gpu_memory import ARGS
from .test_redis_lost import (
    expected,
    test_a_stuck_worker_holds_nobody_up_for_long,
    test_an_old_copy_is_not_believed,
    test_streams_go_on_when_redis_loses_everything,
)
from .test_swap import test_a_preempted_request_is_swapped_out_and_goes_on

pytestmark = pytest.mark.full
__all__ = [
    "expected",
    "inside",
    "test_a_killed_process_is_a_pause_and_no_more",
    "test_a_preempted_request_is_swapped_out_and_goes_on",
    "test_a_stuck_worker_holds_nobody_up_for_long",
    "test_an_old_copy_is_not_believed",
    "test_streams_go_on_when_redis_loses_everything",
    "test_writes_of_a_stopped_worker_reach_no_reader",
]


@pytest.fixture(scope="module")
def deployment(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("run")
    with serving(checkpoint, folder, "--prefill", "2", "--decode", "2", *ARGS) as running:
        yield running


@pytest.fixture(autouse=True)
def swap_tests_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that start their own deployments. The swap pool is a file under the device's pool."""
    monkeypatch.setattr(test_swap, "DEVICE", ("--device", "memfd:0"))
