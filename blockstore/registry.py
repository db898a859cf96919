"""The registry's interface: which gateways, workers and block managers are there, and the arrivals
of requests.

Plain keys under `{quire}`, kept alive by heartbeats; never touched by the functions of the block
store.
"""

from dataclasses import dataclass, field
from typing import Literal, Protocol

Role = Literal["gateway", "prefill", "decode", "block_manager"]
State = Literal["starting", "serving", "draining"]


@dataclass(frozen=True, slots=True)
class Load:
    """`num_free_slots`: sequences a decode worker can still take. `num_pending_tokens`: a prefill
    worker's backlog."""

    num_running: int = 0
    num_waiting: int = 0
    num_free_slots: int = 0
    num_pending_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Member:
    """One running service. `address` is host:port of its gRPC server as others reach it.

    Workers also carry their pool and model: `model_dir` is where the gateway reads tokenizer and
    config from, `max_model_len` the longest prompt + generation, `engine` what computes (backend,
    dtype, isa, threads).
    """

    member_id: str
    role: Role
    address: str
    state: State
    started_unix_ms: int
    protocol_version: int
    pool_id: str = ""
    model: str = ""
    model_dir: str = ""
    max_model_len: int = 0
    max_num_seqs: int = 0
    load: Load = field(default_factory=Load)
    engine: dict[str, str] = field(default_factory=dict)


class Registry(Protocol):
    """Errors: StoreUnavailable, StoreLost."""

    async def announce(self, member: Member, ttl_s: float) -> None:
        """Enter or refresh a member; without a refresh it is gone after `ttl_s`, by the server's
        clock."""

    async def withdraw(self, member_id: str) -> None:
        """Leave. A member that is not there is no error."""

    async def members(self) -> tuple[Member, ...]:
        """Everyone whose time has not run out, sorted by id."""

    async def next_arrival(self) -> int:
        """The store's clock in milliseconds, or 1 more than the last arrival where that is not
        less: every arrival is later than those before, of whichever gateway."""

    async def close(self) -> None: ...
