"""Credentials of a deployment without `quire serve`: the written files, and a real server that uses
them."""

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis

from blockstore.errors import StoreUnsuitable
from blockstore.records import PoolSpec
from blockstore.redis_registry import RedisRegistry
from blockstore.redis_store import RedisStore
from services.gateway.config import GatewaySettings
from services.runtime.config import resolved
from services.runtime.errors import StartupError
from services.runtime.redis import connection_url
from tests.conftest import Valkey
from tests.secret import SECRET

SPEC = PoolSpec("tiny-1", "tiny", "f00d", num_blocks=11, block_size=4, block_bytes=64)


def write(run_dir: Path, **settings: str) -> "subprocess.CompletedProcess[str]":
    given = {f"QUIRE_CREDENTIALS_{name}": text for name, text in settings.items()}
    return subprocess.run(
        [sys.executable, "-m", "services.block_manager.credentials"],
        env=os.environ | given | {"QUIRE_CREDENTIALS_RUN_DIR": str(run_dir)},
        capture_output=True,
        text=True,
        check=False,
    )


def contents(run_dir: Path) -> dict[str, str]:
    """All credentials but the certificates."""
    return {path.name: path.read_text() for path in run_dir.iterdir() if path.is_file()}


def test_credentials_are_made_once_for_this_user_only(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    first = write(run_dir)
    assert first.returncode == 0, first.stderr
    made = contents(run_dir)
    assert sorted(made) == ["redis-password", "secret", "valkey.acl"]
    files = [path for path in run_dir.rglob("*") if path.is_file() and path.suffix != ".crt"]
    assert len(files) == 6
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files)
    ca = (run_dir / "tls" / "ca.crt").read_text()
    assert made["redis-password"] != made["secret"]
    assert write(run_dir).returncode == 0
    assert contents(run_dir) == made
    assert (run_dir / "tls" / "ca.crt").read_text() == ca


def test_passwords_are_written_and_never_logged(tmp_path: Path) -> None:
    assert write(tmp_path).returncode == 0
    done = write(tmp_path, SECRET=20 * "s", REDIS_PASSWORD="hush-hush")
    assert done.returncode == 0
    assert contents(tmp_path)["secret"] == 20 * "s"
    assert contents(tmp_path)["redis-password"] == "hush-hush"
    assert 20 * "s" not in done.stdout + done.stderr
    assert "hush-hush" not in done.stdout + done.stderr


def test_a_secret_that_is_too_short_stops_the_start(tmp_path: Path) -> None:
    done = write(tmp_path, SECRET="short")
    assert done.returncode == 2
    assert "QUIRE_CREDENTIALS_SECRET has 5 bytes, fewer than 16" in done.stderr


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Valkey]:
    """A server with the ACL file; its URL contains the user, as a service composes it."""
    assert write(tmp_path / "run").returncode == 0
    server = LockedValkey(tmp_path, "--aclfile", str(tmp_path / "run" / "valkey.acl"))
    server.start()
    yield server
    server.kill()


class LockedValkey(Valkey):
    def __init__(self, directory: Path, *options: str) -> None:
        super().__init__(directory, *options)
        settings = GatewaySettings(
            redis_url=f"unix://quire@{self.socket}",
            redis_password_file=directory / "run" / "redis-password",
        )
        self.url = connection_url(settings)
        assert self.url not in str(resolved(settings))


@pytest.fixture
async def store(locked: Valkey) -> AsyncIterator[RedisStore]:
    store = await RedisStore.connect(locked.url)
    yield store
    await store.close()


async def test_the_store_and_the_registry_work_for_the_user(
    locked: Valkey, store: RedisStore
) -> None:
    """Calls of blocks, waiters and the registry; another test covers the list of commands."""
    await store.register_pool(SPEC)
    await store.register_worker(SPEC, "w")
    given = await store.allocate("tiny-1", "h", "w", 1, [], 8)
    assert (await store.stats("tiny-1")).num_held == 8
    await store.release("tiny-1", "h", given.epoch)
    assert (await store.audit("tiny-1")).violations == ()
    registry = await RedisRegistry.connect(locked.url, SECRET.registry_key)
    assert await registry.next_arrival()
    assert await registry.members() == ()
    await registry.close()


@pytest.mark.parametrize(
    "command",
    [
        ("FLUSHALL",),
        ("CONFIG", "GET", "*"),
        ("KEYS", "*"),
        ("EVAL", "return 1", 0),
        ("FUNCTION", "DELETE", "quire"),
        ("GET", "another"),
        ("SET", "another", "1"),
        ("ACL", "LIST"),
        ("SHUTDOWN",),
        ("MONITOR",),
        ("SPUBLISH", "another", "1"),
    ],
    ids=lambda command: str(command[0]),
)
def test_the_user_may_do_nothing_else(locked: Valkey, command: tuple[str | int, ...]) -> None:
    with pytest.raises(redis.exceptions.NoPermissionError):
        locked.command(*command)


async def test_other_users_are_refused(locked: Valkey) -> None:
    for url in (f"unix://{locked.socket}", f"unix://quire@{locked.socket}?password=guess"):
        with pytest.raises(StoreUnsuitable):
            await RedisStore.connect(url)


@pytest.mark.parametrize(
    ("url", "content", "text"),
    [
        ("redis://u:pw@host", "pw", "redis_url has a password"),
        ("unix:///s?password=pw", "pw", "redis_url has a password"),
        ("redis://host", "", "is empty"),
        ("redis://host", None, "cannot read the password"),
    ],
)
def test_a_password_that_cannot_be_used_stops_the_start(
    tmp_path: Path, url: str, content: str | None, text: str
) -> None:
    file = tmp_path / "password"
    if content is not None:
        file.write_text(content)
    with pytest.raises(StartupError, match=text) as told:
        connection_url(GatewaySettings(redis_url=url, redis_password_file=file))
    assert "pw" not in str(told.value).replace(str(file), "")


def test_a_password_of_any_characters_arrives_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("a b&c=d%20?#/@:+\n")
    settings = GatewaySettings(
        redis_url="redis://quire@host:7/2?socket_timeout=3", redis_password_file=file
    )
    options = redis.connection.parse_url(connection_url(settings))  # type: ignore[no-untyped-call]
    assert options["password"] == "a b&c=d%20?#/@:+"
    assert (options["username"], options["host"], options["db"]) == ("quire", "host", 2)
