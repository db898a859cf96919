"""The keyring: finds the account of an API key, and follows changes of the key file."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from quire.api_keys import ApiKey, KeyFileError, hash_key, read_keys
from quire.files import version_of
from services.gateway.access.account import Account
from services.runtime.errors import InvalidApiKey, StartupError
from services.runtime.logging import get_logger
from services.runtime.metrics import KeyringMetrics
from services.runtime.ticks import until_tick

_POLL_S = 1.0
_SCHEME = "bearer "
_NO_KEY = "no API key: send the header `Authorization: Bearer KEY` (gRPC: metadata `authorization`)"

log = get_logger(__name__)


class Keyring:
    """The keys of a file.

    A file that cannot be used at the start is a StartupError. Later it changes nothing: the keys
    that were valid before stay valid, and the error is logged and counted.
    """

    def __init__(self, file: Path, metrics: KeyringMetrics) -> None:
        self._file = file
        self._metrics = metrics
        self._accounts: dict[str, Account] = {}
        self._by_hash: dict[str, Account] = {}
        self._version = version_of(file)
        try:
            self._replace(read_keys(file))
        except KeyFileError as error:
            raise StartupError(str(error)) from error

    def account(self, authorization: str | None) -> Account:
        """The account of the key in an Authorization header. Raises InvalidApiKey. The time of the
        lookup shows nothing of a key, because no client can aim at a hash."""
        given = (authorization or "").strip()
        if given[: len(_SCHEME)].lower() != _SCHEME:
            raise InvalidApiKey(_NO_KEY)
        account = self._by_hash.get(hash_key(given[len(_SCHEME) :].strip()))
        if account is None:
            raise InvalidApiKey("the API key does not exist, or was revoked")
        return account

    async def watch(self) -> NoReturn:
        """Follow changes of the file, until cancelled."""
        while True:
            await asyncio.sleep(until_tick(_POLL_S))
            self.reload_if_changed()

    def reload_if_changed(self) -> None:
        """Read the file again if it has changed."""
        version = version_of(self._file)
        if version == self._version:
            return
        self._version = version
        try:
            added, revoked = self._replace(read_keys(self._file))
        except KeyFileError as error:
            log.error("api_keys_refused", reason=str(error), num_keys=len(self._accounts))
            self._metrics.reloads.labels("refused").inc()
            return
        self._metrics.reloads.labels("ok").inc()
        log.info(
            "operation_performed",
            operator="file",
            method="reload_api_keys",
            target=str(self._file),
            outcome="ok",
            num_keys=len(self._accounts),
            added=added,
            revoked=revoked,
        )

    def _replace(self, keys: Sequence[ApiKey]) -> tuple[list[str], list[str]]:
        """Use these keys from now on; returns the names of those that came and went."""
        before, accounts = self._accounts, {}
        for key in keys:
            account = accounts[key.name] = before.get(key.name) or Account(key)
            account.revise(key)
        self._accounts = accounts
        self._by_hash = {each.key.hash: each for each in accounts.values()}
        self._metrics.num_keys.set(len(accounts))
        return sorted(accounts.keys() - before), sorted(before.keys() - accounts)
