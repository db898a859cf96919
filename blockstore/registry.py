"""The registry's interface: it lists gateways, workers and block managers, and gives requests their
arrivals.

Its entries are plain keys under `{quire}`, which expire unless heartbeats renew them; the block
store's functions never use them.
"""

from dataclasses import dataclass, field
from typing import Literal, Protocol

Role = Literal["gateway", "prefill", "decode", "block_manager", "mover"]
State = Literal["starting", "serving", "draining"]


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a service. `num_free_slots`: how many more sequences a decode worker can take.
    `num_pending_tokens`: prompt tokens that a prefill worker has yet to compute. Of the steps of
    the last seconds: `busy_permille`, their share of the time in 1/1000; `step_us`, their mean
    duration; `tokens_per_s`, the tokens computed in a second of steps."""

    num_running: int = 0
    num_waiting: int = 0
    num_free_slots: int = 0
    num_pending_tokens: int = 0
    busy_permille: int = 0
    step_us: int = 0
    tokens_per_s: int = 0


@dataclass(frozen=True, slots=True)
class Member:
    """One running service. `address` is the host:port at which others reach its gRPC server;
    `pid` is of its process, on its host.

    A worker's entry also has its pool and model: the gateway reads tokenizer and config from
    `model_dir`, `max_model_len` limits prompt + generated tokens, and `engine` describes the
    computation (backend, dtype, isa, threads).
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
    pid: int = 0


class AdapterList(Protocol):
    """The LoRA adapters of the deployment, which a registry keeps beside its entries: name -> an
    entry of the gateway that has loaded it. Errors: StoreUnavailable, StoreLost."""

    async def adapters(self) -> dict[str, str]: ...

    async def set_adapter(self, name: str, entry: str) -> None: ...

    async def remove_adapter(self, name: str) -> None: ...


class Registry(AdapterList, Protocol):
    """The list of members, the counter of arrivals, and adapters. Errors: StoreUnavailable,
    StoreLost."""

    async def announce(self, member: Member, ttl_s: float) -> None:
        """Add or renew a member's entry, which expires after `ttl_s` by the server's clock unless
        renewed."""

    async def withdraw(self, member_id: str) -> None:
        """Remove a member's entry. A member without an entry is no error."""

    async def members(self) -> tuple[Member, ...]:
        """Return the members whose entries have not expired, sorted by id."""

    async def next_arrival(self) -> int:
        """Return the server's clock in milliseconds, or the last arrival + 1 if that is later: each
        arrival is later than all before it, for all gateways together."""

    async def close(self) -> None: ...
