"""Whether a deployment without requests has released everything."""

from quire.async_client import AsyncClient
from quire.errors import QuireError
from tests.waiting import until


async def is_quiet(client: AsyncClient) -> bool:
    """Whether no block is held; False too if no gateway answers. AssertionError: a law is
    broken."""
    try:
        pools, audits = await client.pools(), await client.audit()
    except QuireError:
        return False
    for audit in audits:
        assert not audit.violations, audit
        if not audit.recovering:  # its blocks have no places yet
            assert audit.num_free + audit.num_cached + audit.num_held == audit.num_blocks, audit
    is_counted = bool(audits) and all(audit.ledger_checked for audit in audits)
    return is_counted and not any(pool.num_held for pool in pools)


async def quiet(client: AsyncClient, limit_s: float = 60.0) -> None:
    """Wait until no block is held and an audit is clean."""
    await until(lambda: is_quiet(client), limit_s=limit_s)
