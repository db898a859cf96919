"""The roles of a worker: what it does with requests. A role has no part in pool, weights and engine
(`services.worker.pool_engine`), which any role can use.

    prefill   a ticket without blocks -> its prompt is computed -> a detached ticket with blocks
    decode    a detached ticket -> a token a step -> the end of the request

A decode worker of a deployment that mixes them has both in one engine: a step that decodes also
computes chunks of prompts, and reads the weights once for both. A request goes the same way as
between two workers: its ticket is detached in the store and claimed again, and its blocks stay
where they are.
"""

from collections.abc import Mapping
from typing import Any

from blockstore.registry import Role as RoleName
from services.worker.roles.decode import Decode
from services.worker.roles.prefill import Prefill
from services.worker.roles.role import Role

ROLES: Mapping[RoleName, type[Role[Any]]] = {"prefill": Prefill, "decode": Decode}
