"""The gateway's metrics for an autoscaler."""

import pytest
from prometheus_client import CollectorRegistry

from blockstore.memory_registry import MemoryRegistry
from blockstore.memory_store import MemoryStore
from blockstore.records import PoolSpec
from blockstore.registry import Load, Member, Role
from services.gateway.scheduling.planner import export_plans
from services.runtime.metrics import GatewayMetrics

SPEC = PoolSpec("p-1", "m", "fingerprint", 10, 16, 1024, 0)


def member(member_id: str, role: Role, load: Load, pool_id: str = "p-1") -> Member:
    return Member(member_id, role, "h:1", "serving", 0, 1, pool_id=pool_id, model="m", load=load)


async def test_each_model_and_role_has_a_recommendation() -> None:
    """Two of two decode slots are in use, and three requests wait."""
    metrics = CollectorRegistry()
    registry, store = MemoryRegistry(), MemoryStore()
    await store.register_pool(SPEC)
    await registry.announce(member("prefill-1", "prefill", Load(busy_permille=900)), 60)
    await registry.announce(member("decode-1", "decode", Load(num_running=2)), 60)
    gauge = GatewayMetrics(metrics).recommended_workers
    await export_plans(registry, store, {"m": 3}.__getitem__, gauge, 1.0, 0.1)

    def value(role: str) -> float | None:
        labels = {"model_name": "m", "role": role}
        return metrics.get_sample_value("quire:recommended_workers", labels)

    assert (value("prefill"), value("decode")) == (2, 2)


async def test_a_pool_that_goes_meanwhile_changes_nothing() -> None:
    registry, metrics = MemoryRegistry(), CollectorRegistry()
    await registry.announce(member("decode-1", "decode", Load(num_running=2), "gone"), 60)
    gauge = GatewayMetrics(metrics).recommended_workers
    with pytest.raises(Exception, match="gone"):
        await export_plans(registry, MemoryStore(), lambda name: 0, gauge, 1.0, 0.1)
    assert metrics.get_sample_value("quire:recommended_workers") is None
