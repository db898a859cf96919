"""Exports the counters of every pool to Prometheus, and recounts every block reference
periodically."""

import time

from blockstore.records import AuditReport, PoolStats
from blockstore.registry import Registry
from services.block_manager.rounds import Connection
from services.block_manager.survey import Survey
from services.runtime.logging import get_logger
from services.runtime.metrics import MAX_TENANT_LABELS, PoolMetrics
from services.runtime.usage import Used, write_usage

log = get_logger(__name__)


class LastAudits:
    """The last audit of each pool, periodic or by an operator."""

    def __init__(self) -> None:
        self._reports: dict[str, tuple[float, AuditReport]] = {}

    def note(self, report: AuditReport) -> None:
        self._reports[report.pool_id] = time.monotonic(), report

    def find(self, pool_id: str) -> tuple[AuditReport, int] | None:
        """Return the last audit of a pool and its age in seconds, or None if there was none."""
        if pool_id not in self._reports:
            return None
        audited_at, report = self._reports[pool_id]
        return report, int(time.monotonic() - audited_at)

    def forget(self, pool_id: str) -> None:
        self._reports.pop(pool_id, None)


class Auditor:
    def __init__(self, metrics: PoolMetrics, last_audits: LastAudits) -> None:
        self._metrics = metrics
        self._last_audits = last_audits
        self._models: dict[str, str] = {}

    async def observe(self, found: Survey, connection: Connection) -> None:
        """Export the counters of all pools, and remove the counters of pools that are gone."""
        seen = {}
        for stats in found.pools.values():
            self._metrics.observe(stats)
            await self._write_usage(stats, connection.registry)
            seen[stats.spec.pool_id] = stats.spec.model
        for pool_id in self._models.keys() - seen.keys():
            self._metrics.forget(pool_id, self._models[pool_id])
            self._last_audits.forget(pool_id)
        self._models = seen

    async def _write_usage(self, stats: PoolStats, registry: Registry) -> None:
        used = {share.tenant: Used(share.block_ms) for share in stats.shares[:MAX_TENANT_LABELS]}
        source = f"{stats.spec.pool_id} at epoch {stats.ledger_epoch}"
        await write_usage(registry, source, stats.made_ms / 1000, used)

    async def audit(self, connection: Connection) -> None:
        """Recount all pools; log and count every broken law."""
        for report in await connection.of_all_pools(connection.store.audit):
            self._last_audits.note(report)
            for violation in report.violations:
                log.error("law_broken", pool_id=report.pool_id, violation=violation)
            model = self._models.get(report.pool_id, "")
            violations = self._metrics.audit_violations.labels(report.pool_id, model)
            violations.inc(len(report.violations))
