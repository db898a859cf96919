"""During a pull, no wrong KV is used and nothing lands in another owner's blocks; the explorer
finds the fault when a part of the protocol is left out."""

import pytest

from tests.model_checking.explorer import explore_pulls
from tests.model_checking.pull_scenario import PullFaults


def test_every_pull_keeps_the_laws_and_can_end() -> None:
    found = explore_pulls(PullFaults())
    assert found.violation == "", "\n".join(found.trace)
    assert found.num_states > 1000
    assert 0 < found.num_served < found.num_finished


@pytest.mark.parametrize(
    ("left_out", "violation"),
    [
        ("compares", "the ticket has|is in the index with"),
        ("waits", "landed in a block of another holder"),
        ("quiet", "landed in a block of another holder"),
    ],
)
def test_a_part_of_the_protocol_that_is_left_out_is_seen(left_out: str, violation: str) -> None:
    """The parts: the second stamps, the end of a read that was given up, and the exit of a killed
    mover."""
    found = explore_pulls(PullFaults(), left_out)
    assert found.violation
    assert any(text in found.violation for text in violation.split("|")), found.violation
