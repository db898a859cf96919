import pytest

import kvops
from kvops import Backend


@pytest.fixture(scope="session")
def reference() -> Backend:
    return kvops.backend("reference")


@pytest.fixture(scope="session", params=["cpu"])
def ops(request: pytest.FixtureRequest) -> Backend:
    """Every backend that is compared with the reference."""
    return kvops.backend(request.param)
