"""The caller of a request: the API key that it came with, as the rest of the gateway sees it.

The gRPC guard and the HTTP middleware bind the caller to the context of each call. Without a bound
caller every check fails, so that a server without authentication cannot be exposed by mistake.
"""

from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field

from quire.types import Sampling
from services.runtime.errors import PermissionDenied, Unauthenticated

ONE = Sampling()
"""The cost of a call that generates no text: as much as one sequence."""


class NoAccount:
    """The account of a caller without an API key: it has no limits."""

    def admitted(
        self, asked: Sampling = ONE, *, is_further: bool = False
    ) -> AbstractContextManager[None]:
        """Wraps one request from its arrival to its end. The rate of requests counts the first one
        of a call, and not one that `is_further`. Raises RateLimited, or InvalidRequest if the key
        may not ask for so many sequences."""
        return nullcontext()

    def charge(self, num_tokens: int) -> None:
        """Charge tokens as they are used."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Without API keys, every caller is `EVERYONE`."""

    key: str = ""
    """The key's name: requests of different keys are different requests, whatever their ids."""
    tenant: str = ""
    """The key's tenant: cached prefixes of tenants never mix, whatever their `cache_salt`."""
    host: str = ""
    """The client's address, if there is no key."""
    is_operator: bool = False
    models: frozenset[str] | None = None
    """The models that the caller sees; None for all."""
    priority_ceiling: int | None = None
    """The most urgent priority that the caller may ask for; None for the gateway's own setting."""
    retained_blocks: int | None = None
    """The most blocks of a pool that the caller's tenant may retain; None is the usual budget."""
    account: NoAccount = field(default=NoAccount(), repr=False)

    @property
    def client(self) -> str:
        """Among whom a model queue is shared."""
        return self.tenant or self.key or self.host

    def sees(self, model: str) -> bool:
        return self.models is None or model in self.models

    def salt(self, cache_salt: str) -> str:
        """The salt of the caller's prefix hashes. A tenant's name has no slash."""
        return f"{self.tenant}/{cache_salt}" if self.tenant else cache_salt


EVERYONE = Caller()
"""The caller where API keys are off. Servers bind it with the client's host."""
LOCAL_OPERATOR = Caller(key="~local", is_operator=True)
"""The user of the run, who may open its Unix sockets. No key has this name."""

_caller: ContextVar[Caller] = ContextVar("caller")


def bind_caller(caller: Caller) -> None:
    """Make `caller` the caller of the running call."""
    _caller.set(caller)


def current_caller(default: Caller | None = None) -> Caller:
    """The caller of the running call, or `default`. Unauthenticated: there is neither."""
    caller = _caller.get(default)
    if caller is None:
        raise Unauthenticated("this call came through no listener that authenticates its callers")
    return caller


def require_operator() -> Caller:
    """The caller of the running call, who is an operator. Raises PermissionDenied or
    Unauthenticated."""
    caller = current_caller()
    if not caller.is_operator:
        reason = f"key {caller.key} has the role user" if caller.key else "this gateway has no keys"
        raise PermissionDenied(
            f"{reason}; this needs an operator's key, or a command such as `quire workers` on the "
            "gateway's host"
        )
    return caller
