"""Budgets: adds up what all gateways have charged to each key, and keeps it through restarts.

Each gateway has a counter of its own for each key with a budget, <key>/<period>/<gateway>, in the
registry. Only this gateway writes it, and always the whole count, so that a repeated or lost write
does no harm. Between two exchanges, a second apart, gateways do not see each other's charges: a key
may overdraw by what it uses in that time.

Redis keeps nothing through a restart, so each gateway gives the registry the counters that it knows
and that the registry lacks, also those of gateways that are gone. It also writes them to a file of
`directory`, beside the key file. A gateway that starts reads the files of all.
"""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

from blockstore.errors import BlockStoreError
from blockstore.registry import UsageCounters
from quire.files import replace_file
from services.common.runtime.logging import get_logger
from services.common.runtime.ticks import until_tick
from services.gateway.access.keyring import Keyring

_INTERVAL_S = 1.0
FORGET_AFTER = 60
"""The exchanges after which a counter of an unknown key is removed. Until then another gateway may
have read a key file that this one has not, or an operator may restore a key."""

log = get_logger(__name__)


class Budgets:
    """The budgets of one gateway's keys. `gateway`: its name, the same after a restart."""

    def __init__(
        self, keyring: Keyring, registry: UsageCounters, gateway: str, directory: Path | None
    ) -> None:
        self._keyring = keyring
        self._registry = registry
        self._gateway = gateway
        self._directory = directory
        self._known: dict[str, int] | None = None
        """The counters of the registry at the last exchange; None before the first one."""
        self._unknown: dict[str, int] = {}
        """For each counter of an unknown key: the number of exchanges in which it came."""
        self._written: dict[str, int] = {}
        self._reason = ""

    async def run(self) -> None:
        """Exchange counters until cancelled, and once more at the end."""
        try:
            while True:
                await self.exchange()
                await asyncio.sleep(until_tick(_INTERVAL_S))
        finally:
            self._write()

    async def exchange(self) -> None:
        """Publish this gateway's counters, and read those of the others. While the registry does
        not answer, the last known counts stay."""
        own = self._own()
        if not own and self._known is None:
            return  # no key has a budget
        try:
            await self._exchange()
        except BlockStoreError as error:
            self._report(f"the registry does not answer: {error}")
        self._write()

    async def _exchange(self) -> None:
        if self._known is None:  # first learn what this gateway had used before it restarted
            known = self._read()
            self._take(await self._publish({}, known))
            self._known = known
        counters = await self._publish(self._own(), self._known)
        self._take(counters)
        self._unknown = {
            name: self._unknown.get(name, 0) + 1
            for name in counters
            if self._keyring.account_named(name.partition("/")[0]) is None
        }
        ended = [name for name in counters if self._has_ended(name)]
        if ended:
            await self._registry.exchange_usage({}, ended)
        self._known = {name: used for name, used in counters.items() if name not in ended}

    async def _publish(self, own: Mapping[str, int], known: Mapping[str, int]) -> dict[str, int]:
        """Publish this gateway's counters, and those that are `known` and that the registry lacks
        because Redis has restarted. Returns all."""
        counters = await self._registry.exchange_usage(own)
        lost = {name: used for name, used in known.items() if used > counters.get(name, 0)}
        return await self._registry.exchange_usage(lost) if lost else counters

    def _own(self) -> dict[str, int]:
        """The counters of this gateway in the periods that run now."""
        for account in self._keyring.accounts:
            account.follow_period()
        return {
            f"{account.key.name}/{account.period}/{self._gateway}": account.num_used
            for account in self._keyring.accounts
            if account.key.token_budget is not None
        }

    def _take(self, counters: Mapping[str, int]) -> None:
        """Count what the counters say. This gateway's own may be higher than its account knows: it
        has restarted since."""
        elsewhere: dict[str, int] = {}
        for name, used in counters.items():
            key, period, gateway = name.split("/", 2)
            account = self._keyring.account_named(key)
            if account is None or account.period != period:
                continue
            if gateway == self._gateway:
                account.num_used = max(account.num_used, used)
            else:
                elsewhere[key] = elsewhere.get(key, 0) + used
        for account in self._keyring.accounts:
            account.num_used_elsewhere = elsewhere.get(account.key.name, 0)

    def _has_ended(self, name: str) -> bool:
        """Whether the counter is of a revoked key, or of a period before the present one. Names of
        periods sort."""
        key, period, _ = name.split("/", 2)
        account = self._keyring.account_named(key)
        if account is None:
            return self._unknown[name] >= FORGET_AFTER
        if "total" in (period, account.period):
            return False
        return len(period) == len(account.period) and period < account.period

    # ── the files ────────────────────────────────────────────────────────────────────────────────

    def _read(self) -> dict[str, int]:
        """The counters in the files of all gateways."""
        counters: dict[str, int] = {}
        for path in sorted(self._directory.glob("usage-*.json")) if self._directory else ():
            try:
                found = json.loads(path.read_text())
                for name, used in found.items():
                    counters[name] = max(counters.get(name, 0), int(used))
            except (OSError, ValueError, AttributeError) as error:
                log.error("usage_not_read", path=str(path), reason=str(error))
        return {name: used for name, used in counters.items() if name.count("/") >= 2}

    def _write(self) -> None:
        if self._directory is None or self._known is None:
            return
        counters = self._known | self._own()
        if counters == self._written:
            return
        path = self._directory / f"usage-{self._gateway.replace(':', '-')}.json"
        try:
            replace_file(path, json.dumps(counters, indent=1).encode())
        except OSError as error:
            self._report(f"cannot write {path}: {error.strerror}")
            return
        self._written = counters

    def _report(self, reason: str) -> None:
        """Log a reason that is new."""
        if reason != self._reason:
            self._reason = reason
            log.warning("usage_not_kept", reason=reason)
