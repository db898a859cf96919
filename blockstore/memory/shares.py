"""The shares of tenants in a pool: how many blocks each one uses, and for how long.

A block is charged while it is held, and while it is cached under a retained hash: the first to the
tenant of its holders, the second to the owner of the hash. A block that any number of requests
share is charged once, so the shares add up to the used blocks of the pool, and with the free and
the other cached blocks to all of them. No block has to be divided: prefix hashes are salted by
tenant, so holders that share a block have one tenant, and an audit reports a block that has two.
(Only a quarantine shares blocks with others. It pays for those that nobody else held.)

Time is counted in block-milliseconds of the server's clock. A clock that is set back takes time
away, and the shares still add up. Only two sums are kept (`Account`), and no times of blocks.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Self

from blockstore.records import Share

STARTS_MODULUS = 2**52
"""The server counts the `starts` of the whole pool modulo this number."""


@dataclass(slots=True)
class Account:
    """The uses of blocks: one from `start` to `end` is `end - start` long."""

    num_blocks: int = 0
    """The blocks that are used now."""
    starts: int = 0
    """The starts of all uses, less the ends of those that ended."""

    def add(self, number: int, now_ms: int) -> None:
        self.num_blocks += number
        self.starts += number * now_ms

    def block_ms(self, now_ms: int) -> int:
        """The time of all uses until now."""
        return self.num_blocks * now_ms - self.starts


class Shares:
    """The accounts of the tenants, and one of the whole pool, which counts for itself."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.pool = Account()
        self.tenants: defaultdict[str, Account] = defaultdict(Account)
        self.charges = Counter[str]()
        """The changes of tenants' blocks that are not in the accounts yet."""

    @classmethod
    def of(cls, clock: Callable[[], float], accounts: Mapping[str, Account]) -> Self:
        """Make shares of the accounts by tenant; the pool's own account has the name ""."""
        shares = cls(clock)
        copies = {name: replace(account) for name, account in accounts.items()}
        shares.pool = copies.pop("")
        shares.tenants.update(copies)
        return shares

    @property
    def accounts(self) -> dict[str, Account]:
        return {"": self.pool, **self.tenants}

    def settle(self, num_used: int) -> None:
        """Enter the charges, all at one time. `num_used` blocks are used now."""
        now_ms = int(self.clock() * 1000)
        for tenant, number in self.charges.items():
            if number:
                self.tenants[tenant].add(number, now_ms)
        self.charges.clear()
        self.pool.add(num_used - self.pool.num_blocks, now_ms)

    def records(self) -> tuple[Share, ...]:
        """The shares until now, sorted by tenant."""
        now_ms = int(self.clock() * 1000)
        return tuple(
            Share(tenant, account.num_blocks, account.block_ms(now_ms))
            for tenant, account in sorted(self.tenants.items())
        )
