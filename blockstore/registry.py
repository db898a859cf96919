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
    """The load of a service, with measurements of its steps of the last seconds."""

    num_running: int = 0
    num_waiting: int = 0
    num_free_slots: int = 0
    """How many more sequences a decode worker can take."""
    num_pending_tokens: int = 0
    """The prompt tokens that a prefill worker has yet to compute."""
    busy_permille: int = 0
    """The share of the time in which the worker computed steps, in 1/1000."""
    step_us: int = 0
    """The mean duration of a step."""
    tokens_per_s: int = 0
    """The number of tokens that were computed in a second of steps."""


@dataclass(frozen=True, slots=True)
class Member:
    """One running service. The entry of a worker also names its pool and its model."""

    member_id: str
    role: Role
    address: str
    """The host:port at which others reach the service's gRPC server."""
    state: State
    started_unix_ms: int
    protocol_version: int
    pool_id: str = ""
    model: str = ""
    model_dir: str = ""
    """The directory from which a gateway reads tokenizer and configuration."""
    max_model_len: int = 0
    """The most tokens of a prompt and its answer together."""
    max_num_seqs: int = 0
    load: Load = field(default_factory=Load)
    engine: dict[str, str] = field(default_factory=dict)
    """A description of the computation: backend, dtype, isa, threads."""
    pid: int = 0
    """The process of the service, on its host."""
    mix: bool = False
    """Whether this decode worker prefills, too."""

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles in which gateways use the member."""
        return ("prefill", "decode") if self.mix else (self.role,)


class AdapterList(Protocol):
    """The LoRA adapters of the deployment, which a registry keeps beside its entries: name -> an
    entry of the gateway that has loaded it. Errors: StoreUnavailable, StoreLost."""

    @property
    def run_id(self) -> str:
        """The history of the data: another one has begun without the data of the one before."""

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

    async def set_usage(self, minute: int, source: str, entry: str) -> None:
        """Set what a source of usage counted until this minute of Unix time, for a day."""

    async def usage(self, first: int, last: int) -> list[dict[str, str]]:
        """Return the entries of these minutes by source."""

    async def close(self) -> None: ...
