"""The roles of a worker: what it does with requests. A role has no part in pool, weights and engine
(`services.worker.pool_engine`), which any role can use.

    prefill   a ticket without blocks -> its prompt is computed -> a detached ticket with blocks
    decode    a detached ticket -> a token a step -> the end of the request

A decode worker of a deployment that mixes them has both (`services.worker.roles.mixed`).
"""

from collections.abc import Mapping

from blockstore.registry import Role as RoleName
from services.worker.roles.decode import Decode
from services.worker.roles.mixed import Mixed
from services.worker.roles.prefill import Prefill
from services.worker.roles.role import Role

ROLES: Mapping[RoleName, type[Role]] = {"prefill": Prefill, "decode": Decode}


def role_of(name: RoleName, *, mix: bool) -> type[Role]:
    """The role of a worker; a decode worker that mixes prefills, too."""
    return Mixed if mix and name == "decode" else ROLES[name]
