"""The gateway's plans: metrics for an autoscaler, and changes of roles."""

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from blockstore.memory_store import MemoryStore
from blockstore.records import PoolSpec
from blockstore.registry import Load, Member, Role, State
from services.gateway.scheduling.planner import Planner
from services.runtime.metrics import GatewayMetrics
from tests.memory_registry import MemoryRegistry

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
    await Planner("g-1", registry, store, {"m": 3}.__getitem__, (1.0, 0.1), gauge).plan()

    def value(role: str) -> float | None:
        labels = {"model_name": "m", "role": role}
        return metrics.get_sample_value("quire:recommended_workers", labels)

    assert (value("prefill"), value("decode")) == (2, 2)


async def test_a_pool_that_goes_meanwhile_changes_nothing() -> None:
    registry, metrics = MemoryRegistry(), CollectorRegistry()
    await registry.announce(member("decode-1", "decode", Load(num_running=2), "gone"), 60)
    gauge = GatewayMetrics(metrics).recommended_workers
    with pytest.raises(Exception, match="gone"):
        await Planner("g-1", registry, MemoryStore(), lambda name: 0, (1.0, 0.1), gauge).plan()
    assert metrics.get_sample_value("quire:recommended_workers") is None


class Deployment:
    """Two prefill workers and a decode worker on a pool, and a gateway that lets them change."""

    def __init__(self) -> None:
        self.registry, self.store = MemoryRegistry(), MemoryStore()
        self.changes: list[tuple[str, Role]] = []
        gauge = GatewayMetrics(CollectorRegistry()).recommended_workers
        self.planner = Planner(
            "gateway-2",
            self.registry,
            self.store,
            lambda name: 0,
            (1.0, 0.1),
            gauge,
            self._change_role,
        )

    async def _change_role(self, worker_id: str, role: Role) -> None:
        self.changes.append((worker_id, role))

    async def report(self, *busy: float, running: int = 10, state: State = "serving") -> None:
        """Report the load of the prefill workers, and of a decode worker with 10 slots."""
        for number, share in enumerate(busy, 1):
            load = Load(busy_permille=round(1000 * share))
            await self.registry.announce(member(f"prefill-{number}", "prefill", load), 60)
        load = Load(num_running=running, num_free_slots=10 - running)
        await self.registry.announce(replace(member("decode-1", "decode", load), state=state), 60)


@pytest.fixture
async def deployment() -> Deployment:
    made = Deployment()
    await made.store.register_pool(SPEC)
    return made


async def test_a_worker_changes_its_role_when_two_plans_in_a_row_say_so(
    deployment: Deployment,
) -> None:
    """The least busy one; a peak that is over by the next plan changes nothing."""
    await deployment.report(0.2, 0.1)
    await deployment.planner.plan()
    await deployment.report(0.2, 0.1, running=2)
    await deployment.planner.plan()
    await deployment.report(0.2, 0.1)
    await deployment.planner.plan()
    assert deployment.changes == []
    await deployment.planner.plan()
    assert deployment.changes == [("prefill-2", "decode")]
    await deployment.planner.plan()
    assert len(deployment.changes) == 1  # the next one is two plans away again


async def test_roles_stay_if_the_other_role_has_no_worker_to_spare(deployment: Deployment) -> None:
    """It is as busy, or has just one worker on the pool, or a worker is still changing."""
    await deployment.report(0.6, 0.7)
    await deployment.planner.plan()
    await deployment.planner.plan()
    await deployment.report(0.2, 0.1, state="draining")
    await deployment.planner.plan()
    await deployment.planner.plan()
    await deployment.registry.withdraw("prefill-2")
    await deployment.report(0.0)
    await deployment.planner.plan()
    await deployment.planner.plan()
    assert deployment.changes == []


async def test_one_of_several_gateways_changes_roles(deployment: Deployment) -> None:
    await deployment.report(0.2, 0.1)
    gateway = replace(member("gateway-1", "gateway", Load()), pool_id="", model="")
    await deployment.registry.announce(gateway, 60)
    await deployment.planner.plan()
    await deployment.planner.plan()
    assert deployment.changes == []
    await deployment.registry.withdraw("gateway-1")
    await deployment.planner.plan()
    await deployment.planner.plan()
    assert deployment.changes == [("prefill-2", "decode")]
