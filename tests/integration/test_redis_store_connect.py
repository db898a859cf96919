"""The servers that a store accepts, and its errors for others."""

import socket
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.asyncio.connection import AbstractConnection

from blockstore.errors import BlockStoreError, StoreUnavailable, StoreUnsuitable
from blockstore.redis.connection import ask, require_suitable, translate
from blockstore.redis.library import library_text
from blockstore.redis_registry import RedisRegistry
from blockstore.redis_store import RedisStore
from blockstore.store import FUNCTION_LIBRARY, PREVIOUS_LIBRARY
from tests.conftest import Valkey
from tests.secret import SECRET

SUITABLE = {"redis_version": "7.2.4", "role": "master", "maxmemory_policy": "noeviction"}


async def test_the_run_id_is_the_servers(valkey: Valkey) -> None:
    store = await RedisStore.connect(valkey.url)
    registry = await RedisRegistry.connect(valkey.url, SECRET.registry_key)
    assert store.run_id == registry.run_id
    info = valkey.command("INFO")
    assert store.run_id == f"{info['run_id']}.{info['master_replid']}"
    await store.close()
    await registry.close()


async def test_loading_twice_leaves_the_library_as_it_is(valkey: Valkey) -> None:
    """A later process finds the functions and uses them."""
    for _ in range(2):
        store = await RedisStore.connect(valkey.url)
        await store.close()
    listing = str(valkey.command("FUNCTION", "LIST", "LIBRARYNAME", FUNCTION_LIBRARY))
    assert listing.count(f"{FUNCTION_LIBRARY}_allocate") == 1


async def test_a_foreign_library_under_our_name_is_refused_and_kept(own_valkey: Valkey) -> None:
    """A newer deployment on the same server never breaks a running one."""
    theirs = library_text() + "\n-- another version\n"
    own_valkey.command("FUNCTION", "LOAD", theirs)
    with pytest.raises(StoreUnsuitable, match="another version of Quire"):
        await RedisStore.connect(own_valkey.url)
    listing = own_valkey.command("FUNCTION", "LIST", "LIBRARYNAME", FUNCTION_LIBRARY, "WITHCODE")
    assert "-- another version" in str(listing)


async def test_a_pool_of_the_version_before_keeps_its_functions(own_valkey: Valkey) -> None:
    """Its workers call them until they have left."""
    theirs = library_text().replace(FUNCTION_LIBRARY, PREVIOUS_LIBRARY)
    own_valkey.command("FUNCTION", "LOAD", theirs.replace("'library', LIBRARY", "'by', 'them'"))
    spec = ("old", "toy", "f" * 32, "8", "16", "1024", "0")
    function, pool, *fields = f"{PREVIOUS_LIBRARY}_register_pool", *spec
    store = await RedisStore.connect(own_valkey.url, retry_for_s=0.5)
    own_valkey.command("FCALL", function, 1, f"{{{pool}}}", *fields, store.run_id)
    assert (await store.stats("old")).num_free == 8
    assert await store.retentions("old") == ()
    assert not await store.end_retention("old", "owner", "name")
    with pytest.raises(StoreUnavailable):
        await store.retain("old", "owner", "name", 1000, [b"h" * 16], (8, 8))
    assert not (await store.audit("old")).ledger_checked  # this version's audit reads other keys
    own_valkey.command("FUNCTION", "DELETE", PREVIOUS_LIBRARY)
    with pytest.raises(StoreUnavailable):
        await store.stats("old")
    await store.close()


async def test_functions_that_go_as_soon_as_they_are_loaded_are_loaded_again(
    own_valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A FUNCTION FLUSH between two commands is not another version."""
    num_loads = 0

    async def flushed_once(connection: AbstractConnection, *command: str) -> Any:
        nonlocal num_loads
        reply = await ask(connection, *command)
        if command[:2] == ("FUNCTION", "LOAD"):
            num_loads += 1
            if num_loads == 1:
                own_valkey.command("FUNCTION", "FLUSH")
        return reply

    monkeypatch.setattr("blockstore.redis.library.ask", flushed_once)
    store = await RedisStore.connect(own_valkey.url)
    await store.close()
    assert num_loads == 2


async def test_an_evicting_server_is_refused_with_what_to_set(own_valkey: Valkey) -> None:
    own_valkey.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    url = own_valkey.url
    for connected in (RedisStore.connect(url), RedisRegistry.connect(url, SECRET.registry_key)):
        with pytest.raises(StoreUnsuitable, match=r"allkeys-lru.*--maxmemory-policy noeviction"):
            await connected


def test_a_server_without_functions_is_refused() -> None:
    require_suitable("redis://r", SUITABLE)
    with pytest.raises(StoreUnsuitable, match=r"Redis 6\.2\.14.*Redis 7 or newer, or Valkey"):
        require_suitable("redis://r", SUITABLE | {"redis_version": "6.2.14"})


@pytest.mark.parametrize(
    ("field", "value"), [("redis_mode", "sentinel"), ("server_mode", "sentinel"), ("role", "slave")]
)
def test_a_server_that_is_no_primary_is_refused(field: str, value: str) -> None:
    with pytest.raises(StoreUnsuitable, match=value):
        require_suitable("redis://r", SUITABLE | {field: value})


async def test_a_missing_server_is_named_by_url_without_password() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(StoreUnavailable) as refused:
            await RedisStore.connect(f"redis://user:secret@127.0.0.1:{port}/0")
    assert f"redis://user:***@127.0.0.1:{port}/0" in str(refused.value)
    assert "secret" not in str(refused.value)


async def test_a_missing_socket_names_the_url_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable) as refused:
        await RedisStore.connect(f"unix://{tmp_path}/none.sock?password=secret")
    assert f"{tmp_path}/none.sock?password=***" in str(refused.value)
    assert "secret" not in str(refused.value)


async def test_a_wrong_password_is_no_outage(own_valkey: Valkey) -> None:
    """Another attempt would not help, and the text names the fault."""
    own_valkey.command("CONFIG", "SET", "requirepass", "right")
    for url in (own_valkey.url, f"{own_valkey.url}?password=wrong"):
        with pytest.raises(StoreUnsuitable, match=r"(?i)auth|password"):
            await RedisStore.connect(url)
    store = await RedisStore.connect(f"{own_valkey.url}?password=right")
    assert await store.pool_ids() == ()
    await store.close()


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://127.0.0.1:6379", "redis://, rediss://, unix://"),
        ("redis://127.0.0.1:6379?colour=blue", "colour"),
        ("redis://127.0.0.1:6379?socket_timeout=soon", "socket_timeout"),
    ],
)
async def test_a_malformed_url_is_refused(url: str, text: str) -> None:
    with pytest.raises(StoreUnsuitable, match=text):
        await RedisStore.connect(url)


@pytest.mark.parametrize("name", sorted(vars(redis.exceptions)))
def test_every_error_of_the_client_has_a_meaning(name: str) -> None:
    """No exception of redis-py leaves the store."""
    error = vars(redis.exceptions)[name]
    if isinstance(error, type) and issubclass(error, redis.RedisError):
        assert isinstance(translate("redis://r", error("7 host:6379")), BlockStoreError)
