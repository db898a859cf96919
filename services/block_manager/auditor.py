"""Looks after the laws: counters of every pool for Prometheus, and full recounts now and then."""

from blockstore.errors import UnknownPool
from blockstore.store import PoolStats
from services.block_manager.link import Connection
from services.common.logging import get_logger
from services.common.metrics import PoolMetrics

log = get_logger(__name__)


class Auditor:
    def __init__(self, metrics: PoolMetrics) -> None:
        self._metrics = metrics
        self._models: dict[str, str] = {}

    async def observe(self, connection: Connection) -> None:
        """Expose the counters of all pools, and forget pools that are gone."""
        seen = {}
        for stats in await pool_stats(connection):
            self._metrics.observe(stats)
            seen[stats.spec.pool_id] = stats.spec.model
        for pool_id in self._models.keys() - seen.keys():
            self._metrics.forget(pool_id, self._models[pool_id])
        self._models = seen

    async def audit(self, connection: Connection) -> None:
        """Recount all pools; every broken law is an error in the log and a count."""
        for stats in await pool_stats(connection):
            spec = stats.spec
            try:
                report = await connection.store.audit(spec.pool_id)
            except UnknownPool:
                continue
            for violation in report.violations:
                log.error("law_broken", pool_id=spec.pool_id, violation=violation)
            violations = self._metrics.audit_violations.labels(spec.pool_id, spec.model)
            violations.inc(len(report.violations))


async def pool_stats(connection: Connection) -> list[PoolStats]:
    """Counters of all pools that are there, by id."""
    found = []
    for pool_id in await connection.store.pool_ids():
        try:
            found.append(await connection.store.stats(pool_id))
        except UnknownPool:  # Dropped just now.
            continue
    return found
