"""Finds the primary that a URL names, and opens connections to it.

    redis://host:6379/0  rediss://...  unix://...   one server, or any node of a cluster
    redis://a:6379,b:6379/0                         the primary among the hosts of one replicated
                                                    server, in this order; or nodes of a cluster
    sentinel://a:26379,b:26379/name/0               the primary that a Sentinel names; sentinels://
                                                    is the same over TLS

In a cluster, the primary is the node with one key's hash slot. The locator searches again for every
new connection, so a store follows a failover or a moved slot as soon as it reconnects.
"""

from collections.abc import Awaitable, Callable, Collection
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio.connection import AbstractConnection, ConnectionPool, parse_url
from redis.crc import key_slot

from blockstore.errors import NotPrimary, StoreUnavailable, StoreUnsuitable
from blockstore.redaction import without_password
from blockstore.redis.connection import ask, parse_info, server_mode, translate_errors

Options = dict[str, Any]
"""How redis-py connects to one server."""

Opened = tuple[AbstractConnection, dict[str, str]]
"""An open connection, and the sections "server" and "replication" of the server's INFO."""

_SENTINEL_SCHEMES = {"sentinel": "redis", "sentinels": "rediss"}
_SENTINEL_LOGIN = {"sentinel_username": "username", "sentinel_password": "password"}


class Locator:
    """Opens connections to the primary; in a cluster, to the one with the slot of `key`."""

    def __init__(self, url: str, key: str, ours: Options) -> None:
        """`ours` overrides options in the URL. Raises StoreUnsuitable if the URL is malformed."""
        self.url = without_password(url)
        self._slot = key_slot(key.encode())
        self._nodes: list[Options] = []  # primaries of the cluster, as last seen
        try:
            hosts, self._service = _parse(url)
            self._hosts = [{**_without(options, _SENTINEL_LOGIN), **ours} for options in hosts]
            self._sentinels = [_as_sentinel(options) | ours for options in hosts]
            _new_connection(self._hosts[0])
        except (ValueError, TypeError) as exc:  # TypeError: an unknown option
            raise StoreUnsuitable(f"{self.url}: {exc}") from exc

    async def connect(self) -> Opened:
        """Return a new connection to the primary, which the caller disconnects.

        Raises StoreUnavailable if no host answers, and NotPrimary if the hosts that answer are
        replicas now (the only host of a URL may have any role). Raises StoreUnsuitable if, for
        example, a host refuses the password.
        """
        if self._service:
            return await _first(self._sentinels, self._connect_by_sentinel)
        return await _first([*self._hosts, *self._nodes], self._connect_by_host)

    async def _connect_by_host(self, options: Options) -> Opened:
        """Connect to a host, or, if it is a node of a cluster, to the node with the slot."""
        connection, info = opened = await self._open(options)
        if server_mode(info) == "cluster":
            if owner := await self._owner(connection, options):
                await connection.disconnect(nowait=True)
                opened = await self._open(owner)
            return await self._require_primary(opened)
        return opened if len(self._hosts) == 1 else await self._require_primary(opened)

    async def _connect_by_sentinel(self, options: Options) -> Opened:
        """Connect to the primary that this Sentinel names."""
        connection = _new_connection(options)
        try:
            with translate_errors(self.url):
                await connection.connect()  # type: ignore[no-untyped-call]
                name = self._service
                address = await ask(connection, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", name)
        finally:
            await connection.disconnect(nowait=True)
        if address is None:
            raise StoreUnsuitable(f"{self.url}: the Sentinel knows no service {self._service!r}")
        return await self._require_primary(await self._open(_at(self._hosts[0], *address)))

    async def _require_primary(self, opened: Opened) -> Opened:
        connection, info = opened
        if (role := info["role"]) != "master":
            await connection.disconnect(nowait=True)
            raise NotPrimary(f"{self.url}: port {info['tcp_port']} is a {role} now")
        return opened

    async def _open(self, options: Options) -> Opened:
        connection = _new_connection(options)
        try:
            with translate_errors(self.url):
                await connection.connect()  # type: ignore[no-untyped-call]
                sections = [await ask(connection, "INFO", name) for name in _SECTIONS]
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        return connection, parse_info(b"\r\n".join(sections))

    async def _owner(self, connection: AbstractConnection, options: Options) -> Options | None:
        """Return how to connect to the node with the slot, or None if it is this one."""
        try:
            with translate_errors(self.url):
                my_id = await ask(connection, "CLUSTER", "MYID")
                slots = await ask(connection, "CLUSTER", "SLOTS")
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        self._nodes = [_at(options, *primary[:2]) for _, _, primary, *_ in slots]
        for first, last, primary, *_ in slots:
            if first <= self._slot <= last:
                return None if primary[2] == my_id else _at(options, *primary[:2])
        await connection.disconnect(nowait=True)
        raise NotPrimary(f"{self.url}: no node of the cluster has slot {self._slot} now")


_SECTIONS = "server", "replication"


async def _first(hosts: list[Options], connect: Callable[[Options], Awaitable[Opened]]) -> Opened:
    """Connect with the first host that can; otherwise raise the first host's StoreUnavailable."""
    errors = []
    for options in hosts:
        try:
            return await connect(options)
        except StoreUnavailable as error:
            errors.append(error)
    raise errors[0]


def _parse(url: str) -> tuple[list[Options], str]:
    """Return redis-py's options for each host, and the name of the Sentinel's service, which is
    empty if the hosts are servers. Raises ValueError."""
    parts = urlsplit(url)
    scheme, path, service = parts.scheme, parts.path, ""
    if parts.scheme in _SENTINEL_SCHEMES:
        scheme = _SENTINEL_SCHEMES[parts.scheme]
        service, _, database = path.strip("/").partition("/")
        path = f"/{database}"
        if not service:
            raise ValueError("name the service: sentinel://HOST:26379/SERVICE")
    user, at, hosts = parts.netloc.rpartition("@")
    rest = f"{path}?{parts.query}" if parts.query else path
    options = [parse_url(f"{scheme}://{user}{at}{host}{rest}") for host in hosts.split(",")]
    return [dict(each) for each in options], service


def _as_sentinel(options: Options) -> Options:
    """Return the options of a Sentinel, with a login of its own if it needs one."""
    login = {ours: options[name] for name, ours in _SENTINEL_LOGIN.items() if name in options}
    return _without(options, ("username", "password", "db", *_SENTINEL_LOGIN)) | login


def _without(options: Options, names: Collection[str]) -> Options:
    return {name: value for name, value in options.items() if name not in names}


def _at(options: Options, host: bytes | None, port: int | bytes) -> Options:
    """Return the same options for another address. A node that does not know its own host is at
    the address of the node that was asked."""
    known = {} if host in (None, b"", b"?") else {"host": host.decode()}
    return options | known | {"port": int(port)}


def _new_connection(options: Options) -> AbstractConnection:
    """Return a connection object that is not connected yet."""
    connection: AbstractConnection = ConnectionPool(**options).make_connection()  # type: ignore[no-untyped-call]
    return connection
