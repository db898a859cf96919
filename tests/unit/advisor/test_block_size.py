"""The store's costs without a server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from advisor import block_size
from advisor.block_size import AdviceRequest, _store_us
from advisor.costs import Replay
from advisor.simulation import Outcome
from advisor.workload import RecordedRequest, Workload
from quire.supervisor.errors import NoValkey

OUTCOME = Outcome(2, 5, 0, 0.9, 0.9, (0.05, 0.05), 2.0, 2, 10.0)


@asynccontextmanager
async def nowhere() -> AsyncIterator[str]:
    raise NoValkey("the embedded Valkey is not installed")
    yield ""


async def test_without_a_server_calls_and_blocks_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """150 us a call, and 3.5 us each time that a block is named: it is allocated, committed and
    released. For 40 tokens in blocks of 16: 8 * 150 + 6 * 3 * 3.5 us."""
    monkeypatch.setattr(block_size, "embedded_valkey", nowhere)
    asked = (RecordedRequest(10, 20), RecordedRequest(10, 20))
    replays = {16: Replay(OUTCOME, 8, 6), 32: Replay(OUTCOME, 4, 3)}
    question = AdviceRequest(Workload(asked), Path("nowhere"))
    found, how = await _store_us(question, asked, 256, replays, 64)
    assert found == {16: (8 * 150 + 63) / 40, 32: (4 * 150 + 31.5) / 40}
    assert how.startswith("store: counted")
