"""A worker that has nothing asks the store for nothing, until there is a reason to."""

from collections import Counter

import pytest

from blockstore.memory_store import MemoryStore
from blockstore.records import Heartbeat
from services.worker import pool_worker

from .conftest import MakeBench
from .fakes import ticket


class Calls:
    """Counts what the workers ask of the store, by worker. `num_pauses`: begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_heartbeats = Counter[str]()
        self.num_pauses = 0
        heartbeat, wait = MemoryStore.heartbeat, MemoryStore.wait_for_room

        async def counted(store: MemoryStore, pool_id: str, worker_id: str) -> Heartbeat:
            self.num_heartbeats[worker_id] += 1
            return await heartbeat(store, pool_id, worker_id)

        async def pausing(store: MemoryStore, pool_id: str, timeout_s: float) -> None:
            self.num_pauses += 1
            await wait(store, pool_id, timeout_s)

        monkeypatch.setattr(MemoryStore, "heartbeat", counted)
        monkeypatch.setattr(MemoryStore, "wait_for_room", pausing)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The pulse of a busy worker is fast; of an idle one none comes within the test."""
    monkeypatch.setattr(pool_worker, "_PULSE_S", 0.001)
    monkeypatch.setattr(pool_worker, "_IDLE_PULSE_S", 1000.0)
    return Calls(monkeypatch)


async def test_the_pulse_of_an_idle_worker_waits_for_a_reason(
    calls: Calls, make_bench: MakeBench
) -> None:
    bench = await make_bench()
    prefill, decode = bench.prefill.worker_id, bench.decode.worker_id
    await bench.until(lambda: calls.num_pauses == 2)
    assert calls.num_heartbeats == {prefill: 1, decode: 1}
    assert not bench.prefill.stalled

    bench.prefill_model.gate.clear()  # a request: demands may come for it
    bench.prefill.submit(bench.session, ticket("r1", range(6), max_tokens=1))
    await bench.until(lambda: calls.num_heartbeats[prefill] > 5)
    assert calls.num_heartbeats[decode] == 1

    bench.prefill_model.gate.set()  # its end: blocks are freed, which both hear of
    await bench.until_empty()
    await bench.until(lambda: calls.num_heartbeats[decode] == 2)
    await bench.until(lambda: calls.num_pauses >= 4)
    num_heartbeats = calls.num_heartbeats.copy()
    for _ in range(20):
        await bench.store.stats("pool")
    assert calls.num_heartbeats == num_heartbeats
