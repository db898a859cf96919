"""The limit of open files, and the share for connections."""

import resource
from collections.abc import Iterator

import pytest

from services.runtime import open_files


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    """The soft and hard limits, before and after."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_soft_limit_is_raised_to_the_hard_one(limits: tuple[int, int]) -> None:
    _, hard = limits
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard // 2, hard))
    open_files.raise_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)


@pytest.mark.parametrize(("soft", "room"), [(1024, 448), (512, 192), (130, 1), (100, 1)])
def test_connections_leave_room_for_others(limits: tuple[int, int], soft: int, room: int) -> None:
    """Also with a very small limit."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, limits[1]))
    assert open_files.room_for_connections(2) == room
