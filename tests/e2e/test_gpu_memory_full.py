"""The tests of crashes, lost ledgers and swaps, on a pool that is kept like a GPU's."""

import pytest

from . import test_swap
from .deployment import deploying
from .test_crashes import (
    pool_view,
    test_a_killed_process_only_delays_streams,
    test_other_workers_never_read_writes_of_a_stopped_worker,
)
from .test_gpu_memory import ARGS
from .test_redis_lost import (
    expected,
    test_a_stuck_worker_delays_others_only_until_it_is_fenced,
    test_an_old_copy_of_redis_is_not_used,
    test_streams_go_on_when_redis_loses_everything,
)
from .test_swap import test_a_preempted_request_is_swapped_out_and_goes_on

pytestmark = pytest.mark.full
__all__ = [
    "expected",
    "pool_view",
    "test_a_killed_process_only_delays_streams",
    "test_a_preempted_request_is_swapped_out_and_goes_on",
    "test_a_stuck_worker_delays_others_only_until_it_is_fenced",
    "test_an_old_copy_of_redis_is_not_used",
    "test_other_workers_never_read_writes_of_a_stopped_worker",
    "test_streams_go_on_when_redis_loses_everything",
]


deployment = deploying("--prefill", "2", "--decode", "2", *ARGS)


@pytest.fixture(autouse=True)
def swap_tests_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that start their own deployments. The swap pool is a file under the device's pool."""
    monkeypatch.setattr(test_swap, "DEVICE", ("--device", "memfd:0"))
