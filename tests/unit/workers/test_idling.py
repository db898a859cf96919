"""An idle worker makes no calls of the store without a reason."""

from collections import Counter

import pytest

from blockstore.memory_store import MemoryStore
from blockstore.records import Heartbeat
from services.worker.liveness import heartbeats

from .conftest import MakePair
from .fakes import ticket


class CountingStore(MemoryStore):
    """Counts the heartbeats of each worker, and the waits for room that have begun."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heartbeats = Counter[str]()
        self.num_pauses = 0

    async def heartbeat(self, pool_id: str, worker_id: str) -> Heartbeat:
        self.num_heartbeats[worker_id] += 1
        return await super().heartbeat(pool_id, worker_id)

    async def wait_for_room(self, pool_id: str, timeout_s: float) -> None:
        self.num_pauses += 1
        await super().wait_for_room(pool_id, timeout_s)


async def test_an_idle_worker_skips_heartbeats(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy worker's heartbeats are fast here; an idle worker sends none within the test."""
    monkeypatch.setattr(heartbeats, "_HEARTBEAT_S", 0.001)
    monkeypatch.setattr(heartbeats, "_IDLE_HEARTBEAT_S", 1000.0)
    pair = await make_pair(store=(calls := CountingStore()))
    prefill, decode = pair.prefill.worker_id, pair.decode.worker_id
    await pair.until(lambda: calls.num_pauses == 2)
    assert calls.num_heartbeats == {prefill: 1, decode: 1}

    pair.prefill_model.gate.clear()  # a request: demands may come for it
    pair.prefill.role.submit(pair.session, ticket("r1", range(6), max_tokens=1))
    await pair.until(lambda: calls.num_heartbeats[prefill] > 5)
    assert calls.num_heartbeats[decode] == 1

    pair.prefill_model.gate.set()  # its end: blocks are freed, which both hear of
    await pair.until_empty()
    await pair.until(lambda: calls.num_heartbeats[decode] == 2)
    await pair.until(lambda: calls.num_pauses >= 4)
    num_heartbeats = calls.num_heartbeats.copy()
    for _ in range(20):
        await pair.store.stats("pool")
    assert calls.num_heartbeats == num_heartbeats
