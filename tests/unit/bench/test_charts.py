"""The charts of `quire bench`'s report."""

from quire.bench.charts import steps


def test_steps_keep_each_value_until_the_next_one() -> None:
    corners = [(0.0, 0), (1.0, 0), (1.0, 2), (4.0, 2), (4.0, 1)]
    assert steps([(0.0, 0), (1.0, 2), (4.0, 1)]) == corners
    assert steps([]) == []
