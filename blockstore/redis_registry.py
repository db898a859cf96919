"""The registry in Redis: keys under `{quire}`.

{quire}:members         SET     ids of members, including some that have expired
{quire}:member:<id>     STRING  one member, signed: HMAC-SHA256 in hex, a space, the member as JSON;
                                expires unless renewed
{quire}:arrivals        ZSET    "arrivals" -> the last arrival: 1 more than the server's clock in
                                ms, or than the arrival before
{quire}:adapters        HASH    name of a LoRA adapter -> a signature as above, a space, the entry
{quire}:usage:<minute>  HASH    source -> what it counted until then; expires after a day

All keys have one hash tag, so that one node of a cluster has them.
A server may lose all this: members announce themselves again, gateways list the adapters that they
know, and the server's clock is later than every arrival before, unless there were a thousand a
second.

`members` leaves out and reports entries whose signature was not made with this deployment's key.
The signature covers the key's name and the whole member, including the address. It cannot show that
an entry is an old one that somebody restored, so a service that connects to a member also requires
a proof from it.
"""

import asyncio
import hmac
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from typing import Any, Self

from blockstore.errors import StoreLost
from blockstore.redis import keys
from blockstore.redis.library import load_functions
from blockstore.redis.replies import text_fields
from blockstore.redis.server import Server
from blockstore.redis.stream import CommandStream
from blockstore.registry import Load, Member
from blockstore.store import FUNCTION_LIBRARY

USAGE_KEPT_S = 25 * 3600


def encode(member: Member, key: bytes) -> str:
    text = json.dumps(asdict(member), separators=(",", ":"))
    return f"{_signature(key, member.member_id, text.encode())} {text}"


def decode(member_id: str, entry: bytes, key: bytes) -> Member | None:
    """Return a member as it announced itself, or None if `key` did not sign the entry for this
    member id. Unknown fields, which a newer version may have written, are left out."""
    signature, _, text = entry.partition(b" ")
    if not hmac.compare_digest(signature, _signature(key, member_id, text).encode()):
        return None
    values = json.loads(text)
    load = Load(**_known(Load, values.pop("load", {})))
    return Member(**_known(Member, values), load=load)


def _signature(key: bytes, member_id: str, text: bytes) -> str:
    return hmac.digest(key, keys.member(member_id).encode() + b"\n" + text, "sha256").hex()


def _known(cls: type[Load] | type[Member], values: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(cls)}
    return {name: value for name, value in values.items() if name in names}


class RedisRegistry:
    """The registry in Redis; see `blockstore.registry.Registry`. `refused` has the ids of the
    entries that the last call of `members` left out; `on_refused` is called with each new one."""

    def __init__(
        self,
        url: str,
        server: Server,
        stream: CommandStream,
        key: bytes,
        on_refused: Callable[[str], None] = lambda member_id: None,
    ) -> None:
        """Use `connect`."""
        self._url = url
        self._server = server
        self._stream = stream
        self._key = key
        self._on_refused = on_refused
        self.refused: frozenset[str] = frozenset()
        self._last_arrival = 0
        server.set_renew(self._renew)

    @classmethod
    async def connect(
        cls,
        url: str,
        key: bytes,
        *,
        retry_for_s: float = 5.0,
        on_refused: Callable[[str], None] = lambda member_id: None,
    ) -> Self:
        """Connect; `key` signs entries. Raises StoreUnavailable or StoreUnsuitable."""
        server = _server(url, min(2.0, retry_for_s / 2))
        await server.check_suitable()
        stream = CommandStream(server, retry_for_s, renews=True)
        return cls(url, server, stream, key, on_refused)

    @property
    def run_id(self) -> str:
        """Which history of data the server has; see `Server.run_id`."""
        return self._server.run_id

    async def announce(self, member: Member, ttl_s: float) -> None:
        key, entry = keys.member(member.member_id), encode(member, self._key)
        await asyncio.gather(
            self._stream.submit(("SET", key, entry, "PX", max(1, round(ttl_s * 1000)))),
            self._stream.submit(("SADD", keys.MEMBERS, member.member_id)),
        )

    async def withdraw(self, member_id: str) -> None:
        await asyncio.gather(
            self._stream.submit(("DEL", keys.member(member_id))),
            self._stream.submit(("SREM", keys.MEMBERS, member_id)),
        )

    async def members(self) -> tuple[Member, ...]:
        ids = sorted(
            member_id.decode(errors="replace")
            for member_id in await self._stream.send("SMEMBERS", keys.MEMBERS)
        )
        if not ids:
            return ()
        values = await self._stream.send("MGET", *map(keys.member, ids))
        found = dict(zip(ids, values, strict=True))
        # A member that renews its entry at this moment loses its id until its next heartbeat.
        if expired := [member_id for member_id, value in found.items() if value is None]:
            await self._stream.send("SREM", keys.MEMBERS, *expired)
        there = {
            member_id: decode(member_id, value, self._key)
            for member_id, value in found.items()
            if value is not None
        }
        self._refuse(member_id for member_id, member in there.items() if member is None)
        return tuple(member for member in there.values() if member is not None)

    def _refuse(self, member_ids: Iterable[str]) -> None:
        refused = frozenset(member_ids)
        for member_id in sorted(refused - self.refused):
            self._on_refused(member_id)
        self.refused = refused

    async def next_arrival(self) -> int:
        """Return the next arrival; after a lost answer a number may be left out, but none is given
        twice."""
        command = "FCALL", f"{FUNCTION_LIBRARY}_next_arrival", 1, keys.REGISTRY, self._last_arrival
        arrival = int(await self._stream.submit(command, is_loss=_has_no_functions))
        self._last_arrival = max(self._last_arrival, arrival)
        return arrival

    async def adapters(self) -> dict[str, str]:
        flat = iter(await self._stream.send("HGETALL", keys.ADAPTERS))
        found = {}
        for name, value in zip(flat, flat, strict=True):
            signature, _, entry = value.partition(b" ")
            signed = _signature(self._key, f"adapter {name.decode()}", entry)
            if hmac.compare_digest(signature, signed.encode()):
                found[name.decode()] = entry.decode()
        return found

    async def set_adapter(self, name: str, entry: str) -> None:
        signature = _signature(self._key, f"adapter {name}", entry.encode())
        await self._stream.send("HSET", keys.ADAPTERS, name, f"{signature} {entry}")

    async def remove_adapter(self, name: str) -> None:
        await self._stream.send("HDEL", keys.ADAPTERS, name)

    async def set_usage(self, minute: int, source: str, entry: str) -> None:
        key = keys.usage(minute)
        await asyncio.gather(
            self._stream.submit(("HSET", key, source, entry)),
            self._stream.submit(("EXPIRE", key, USAGE_KEPT_S)),
        )

    async def usage(self, first: int, last: int) -> list[dict[str, str]]:
        minutes = range(first, last + 1)
        calls = (self._stream.submit(("HGETALL", keys.usage(minute))) for minute in minutes)
        return [text_fields(flat) for flat in await asyncio.gather(*calls)]

    async def close(self) -> None:
        await self._stream.close()

    async def _renew(self, run_id: str) -> None:
        """Load the functions. Members announce themselves again to a server that lost its data."""
        await _server(self._url, self._server.timeout_s).check_suitable()


def _server(url: str, timeout_s: float) -> Server:
    return Server(url, timeout_s, keys.MEMBERS, load_functions)


def _has_no_functions(error: Exception) -> bool:
    return isinstance(error, StoreLost)
