"""How the gateway's parts are put together."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from blockstore.registry import Load, Member, Registry, State
from blockstore.store import BlockStore
from services.common.presence import Presence
from services.common.rpc import RpcServer
from services.common.secret import Secret
from services.common.version import PROTOCOL_VERSION
from services.gateway.bell import Bell
from services.gateway.catalog import load_model
from services.gateway.dispatcher import Dispatcher, Limits
from services.gateway.figures import Figures
from services.gateway.fleet import Fleet
from services.gateway.gateway import Gateway
from services.gateway.mover import Mover
from services.gateway.peers import SILENCE_S, Peer
from services.gateway.router import Router


@dataclass(frozen=True, slots=True)
class Assembly:
    gateway_id: str
    gateway: Gateway
    fleet: Fleet
    dispatcher: Dispatcher
    mover: Mover
    changes: Bell

    def describe(self, address: str, started_unix_ms: int, *, stopping: bool) -> Member:
        """The gateway's own entry in the registry."""
        state: State = "serving" if self.gateway.ready() else "starting"
        return Member(
            member_id=self.gateway_id,
            role="gateway",
            address=address,
            state="draining" if stopping else state,
            started_unix_ms=started_unix_ms,
            protocol_version=PROTOCOL_VERSION,
            load=Load(
                num_running=self.dispatcher.num_running, num_waiting=self.dispatcher.num_waiting
            ),
        )


@asynccontextmanager
async def assembled(
    store: BlockStore,
    registry: Registry,
    secret: Secret,
    limits: Limits,
    figures: Figures,
    poll_s: float = 1.0,
    silence_s: float = SILENCE_S,
    *,
    client_priority: bool = False,
    report_cached_tokens: bool = False,
) -> AsyncIterator[Assembly]:
    """A gateway that follows the registry, until the block is left. What fails in the background
    (StoreLost) is raised in the block, as an exception group."""
    gateway_id = f"gateway-{secrets.token_hex(4)}"
    changes = Bell()
    fleet = Fleet(
        registry,
        store,
        connect=lambda member: Peer(member, gateway_id, secret.rpc_key, dispatcher, silence_s),
        load=load_model,
        on_change=changes.ring,
        poll_s=poll_s,
        gateway_id=gateway_id,
    )
    dispatcher = Dispatcher(
        fleet, Router(store, secret.root), registry, limits, changes, figures.has_ended
    )
    figures.watch(lambda: dispatcher.num_running, lambda: dispatcher.num_waiting)
    gateway = Gateway(
        *(fleet, dispatcher, changes, figures, limits.patience_s),
        client_priority=client_priority,
        report_cached_tokens=report_cached_tokens,
    )
    async with asyncio.TaskGroup() as tasks:
        mover = Mover(fleet, changes, limits.reserve_timeout_s)
        background = [
            tasks.create_task(fleet.watch(), name="registry"),
            tasks.create_task(mover.clear_out(), name="clear out"),
        ]
        if limits.rebalance_s:
            moving = mover.rebalance(limits.rebalance_s)
            background.append(tasks.create_task(moving, name="rebalance"))
        try:
            yield Assembly(gateway_id, gateway, fleet, dispatcher, mover, changes)
        finally:
            await dispatcher.close()
            for task in background:
                task.cancel()


async def keep_health(assembly: Assembly, servers: Sequence[RpcServer], presence: Presence) -> None:
    """Health checks and the registry say that it serves while there are workers of each kind.
    Until cancelled."""
    serving = False
    while True:
        heard = assembly.changes.rings
        if (ready := assembly.gateway.ready()) != serving:
            serving = ready
            for server in servers:
                await server.set_serving(serving)
            presence.changed()
        await assembly.changes.wait(heard)
