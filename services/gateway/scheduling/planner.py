"""Plans how many workers of each role the load of each model needs, for an autoscaler and for
workers that change their role."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from prometheus_client import Gauge

from blockstore.errors import BlockStoreError
from blockstore.registry import Member, Registry, Role
from blockstore.store import BlockStore
from quire.planning import RolePlan, held_share, plan_decode, plan_prefill
from services.runtime.errors import QuireError
from services.runtime.logging import get_logger

_INTERVAL_S, _ROLES_INTERVAL_S = 5.0, 2.0
"""The time from one plan to the next: the second if workers change their roles."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """The plan for one model, and its serving workers."""

    members: Sequence[Member]
    roles: Mapping[Role, RolePlan]

    def change(self) -> tuple[Member, Role] | None:
        """The worker that should take the other role, and that role: a role lacks a worker that the
        other one can spare on one of its pools; the least busy one goes. None if there is only one
        role."""
        if len(self.roles) < 2:
            return None
        ways: tuple[tuple[Role, Role], ...] = (("prefill", "decode"), ("decode", "prefill"))
        for role, other in ways:
            lacking, spare = self.roles[role], self.roles[other]
            if lacking.needed <= lacking.num_workers or spare.recommended >= spare.num_workers:
                continue
            there = [member for member in self.members if member.role == other]
            pools = [member.pool_id for member in there]
            able = [member for member in there if pools.count(member.pool_id) > 1]
            if able:
                return min(able, key=lambda each: (each.load.busy_permille, each.member_id)), role
        return None


async def make_plans(
    members: Sequence[Member],
    store: BlockStore,
    num_waiting: Callable[[str], int],
    ttft_s: float,
    inter_token_s: float,
) -> dict[str, ModelPlan]:
    """Plan each model's workers from their reports to the registry. `num_waiting` returns the
    number of requests in a model's queue. Raises BlockStoreError."""
    models: dict[str, list[Member]] = defaultdict(list)
    for member in members:
        if member.model and member.state == "serving":
            models[member.model].append(member)
    plans = {}
    for name, of_model in models.items():
        stats = await asyncio.gather(*map(store.stats, {each.pool_id for each in of_model}))
        held = held_share((each.num_held, each.spec.num_blocks) for each in stats)
        prefill = [member.load for member in of_model if member.role == "prefill"]
        decode = [member.load for member in of_model if member.role == "decode"]
        roles: dict[Role, RolePlan] = {
            "prefill": plan_prefill(prefill, ttft_s),
            "decode": plan_decode(decode, inter_token_s, num_waiting(name), held),
        }
        if not prefill and any(member.mix for member in of_model):
            del roles["prefill"]  # the decode workers prefill, too
        plans[name] = ModelPlan(of_model, roles)
    return plans


class Planner:
    """Exports as `recommended` how many workers of each role the load of each model needs, and lets
    workers change their role if there is `change_role`: it tells a worker, and raises QuireError if
    that refuses.

    A model changes one worker at a time, and only if two plans in a row ask for the same role. Of
    several gateways, the one with the first id acts.
    """

    def __init__(
        self,
        gateway_id: str,
        registry: Registry,
        store: BlockStore,
        num_waiting: Callable[[str], int],
        targets: tuple[float, float],
        recommended: Gauge,
        change_role: Callable[[str, Role], Awaitable[None]] | None = None,
    ) -> None:
        self._gateway_id = gateway_id
        self._registry = registry
        self._planning = store, num_waiting, *targets
        self._recommended = recommended
        self._change_role = change_role
        self._wanted: dict[str, Role] = {}

    async def follow(self) -> NoReturn:
        """Plan again and again. While the store does not answer, the last plan stays."""
        while True:
            with suppress(BlockStoreError):
                await self.plan()
            await asyncio.sleep(_INTERVAL_S if self._change_role is None else _ROLES_INTERVAL_S)

    async def plan(self) -> None:
        """Make a plan and export it; change a role if the plan before asked for it too. Raises
        BlockStoreError."""
        members = await self._registry.members()
        plans = await make_plans(members, *self._planning)
        for name, plan in plans.items():
            for role, of_role in plan.roles.items():
                self._recommended.labels(name, role).set(of_role.recommended)
        gateways = [m.member_id for m in members if (m.role, m.state) == ("gateway", "serving")]
        before, self._wanted = self._wanted, {}
        if self._gateway_id != min(gateways, default=self._gateway_id):
            return
        for name, plan in plans.items():
            if any((m.model, m.state) == (name, "draining") for m in members):
                continue  # the last change is not over
            if (change := plan.change()) is None:
                continue
            worker, role = change
            if before.get(name) == role:
                await self._change(worker.member_id, role, plan.roles[role].reason)
            else:
                self._wanted[name] = role

    async def _change(self, worker_id: str, role: Role, reason: str) -> None:
        if self._change_role is None:
            return
        log.info("role_planned", worker_id=worker_id, role=role, reason=reason)
        try:
            await self._change_role(worker_id, role)
        except QuireError as error:
            log.warning("role_not_changed", reason=str(error))
