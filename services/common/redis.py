"""How a service comes to its block store and registry at start."""

from contextlib import AsyncExitStack

from blockstore.redis_registry import RedisRegistry
from blockstore.redis_store import RedisStore
from services.common.config import ServiceSettings, without_password
from services.common.process import with_patience


async def connect(
    settings: ServiceSettings,
    stack: AsyncExitStack,
    store_retry_for_s: float,
    registry_retry_for_s: float = 5.0,
    patience_s: float | None = None,
) -> tuple[RedisStore, RedisRegistry]:
    """Both of the server at `redis_url`, closed with `stack`; each sends an unanswered call again
    for so long. StartupError: patience, that of the settings unless given, is over, or the server
    cannot carry a block store."""
    url = settings.redis_url
    patience_s = settings.redis_patience_s if patience_s is None else patience_s
    what = f"Redis at {without_password(url)}"
    store = await with_patience(
        lambda: RedisStore.connect(url, retry_for_s=store_retry_for_s), what, patience_s
    )
    stack.push_async_callback(store.close)
    registry = await with_patience(
        lambda: RedisRegistry.connect(url, retry_for_s=registry_retry_for_s), what, patience_s
    )
    stack.push_async_callback(registry.close)
    return store, registry
