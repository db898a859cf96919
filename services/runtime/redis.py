"""Connects a service to the block store and the registry."""

from collections.abc import Callable
from contextlib import AsyncExitStack
from urllib.parse import parse_qs, quote, urlsplit

from blockstore.redaction import without_password
from blockstore.redis_registry import RedisRegistry
from blockstore.redis_store import RedisStore
from services.runtime.config import ServiceSettings
from services.runtime.errors import StartupError
from services.runtime.logging import get_logger
from services.runtime.process import retry_until_available
from services.runtime.secret import deployment_secret

log = get_logger(__name__)


async def connect(
    settings: ServiceSettings,
    stack: AsyncExitStack,
    store_retry_for_s: float,
    registry_retry_for_s: float = 5.0,
    patience_s: float | None = None,
) -> tuple[RedisStore, RedisRegistry]:
    """Connect to the block store and the registry at `redis_url`; `stack` closes both.

    Store and registry repeat a call without an answer for `store_retry_for_s` and
    `registry_retry_for_s`. Raises StartupError if Redis has not answered in `patience_s` (by
    default `redis_patience_s` of the settings), or cannot serve as a block store.
    """
    url = connection_url(settings)
    patience_s = settings.redis_patience_s if patience_s is None else patience_s
    server = f"Redis at {without_password(settings.redis_url)}"
    store = await retry_until_available(
        lambda: RedisStore.connect(url, retry_for_s=store_retry_for_s), server, patience_s
    )
    stack.push_async_callback(store.close)
    registry = await retry_until_available(
        lambda: open_registry(settings, retry_for_s=registry_retry_for_s), server, patience_s
    )
    stack.push_async_callback(registry.close)
    return store, registry


async def open_registry(
    settings: ServiceSettings,
    *,
    retry_for_s: float = 5.0,
    on_refused: Callable[[str], None] = lambda member_id: None,
) -> RedisRegistry:
    """Open the deployment's registry, whose entries are signed with the deployment's secret.

    `on_refused` gets the member id of an entry without a valid signature. Raises StoreUnavailable,
    StoreUnsuitable, StartupError.
    """

    def refused(member_id: str) -> None:
        reason = "its entry is not signed with this deployment's secret"
        log.error("member_refused", member_id=member_id, reason=reason)
        on_refused(member_id)

    key = deployment_secret(settings).registry_key
    return await RedisRegistry.connect(
        connection_url(settings), key, retry_for_s=retry_for_s, on_refused=refused
    )


def connection_url(settings: ServiceSettings) -> str:
    """Return `redis_url` with the password from `redis_password_file`, which must not be logged.
    Raises StartupError if there are two passwords, or the file is unreadable or empty."""
    url, file = settings.redis_url, settings.redis_password_file
    if file is None:
        return url
    parts = urlsplit(url)
    if parts.password is not None or "password" in parse_qs(parts.query):
        raise StartupError(f"redis_url has a password, and redis_password_file names {file}")
    try:
        password = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"cannot read the password of Redis in {file}: {error}") from error
    if not password:
        raise StartupError(f"the password of Redis in {file} is empty")
    return f"{url}{'&' if parts.query else '?'}password={quote(password, safe='')}"
