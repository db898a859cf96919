"""A short run of `make chaos`."""

from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from tests.chaos.harness import run_chaos
from tests.chaos.schedule import FAULT_KINDS, schedule

SEED = 2
"""A decode worker is stopped for 10 s, so that it is given up, and Redis is away for 2 s."""
NUM_CASES = 11
"""One of each kind, without those of 3,000 tokens."""
KINDS = [kind for kind in FAULT_KINDS if kind != "upgrade run"]
"""An upgrade takes longer than the run, and has a test of its own."""


@pytest.mark.parametrize("device", ["cpu", pytest.param("memfd:0", marks=pytest.mark.full)])
async def test_clients_notice_no_fault_of_any_kind(tmp_path: Path, device: str) -> None:
    """Processes are killed, stopped and drained, workers take the other role, and Redis loses its
    data or returns with an old copy: every finished stream has the undisturbed output, none fails
    or hangs, the laws hold, and no block is held in the end."""
    report = await run_chaos(tmp_path, SEED, None, KINDS, device, NUM_CASES)
    assert not report.tally.violations, str(report)
    assert report.kinds == Counter(KINDS), str(report)
    assert report.tally.num_finished > 15, str(report)
    print(report)


def test_a_seed_gives_its_schedule() -> None:
    """A seed draws every kind of fault, and always the same schedule."""
    first, again, other = (list(islice(schedule(seed), 300)) for seed in (1, 1, 2))
    assert first == again != other
    assert {fault.kind for fault in first} == set(FAULT_KINDS)
