"""`quire audit`: recounts every block reference of a live system."""

import sys
from typing import Annotated

from typer import Option

from quire.cli.flags import Json, OperationsFlags
from quire.cli.output import Columns, print_items
from quire.reports import PoolAudit

_COLUMNS: Columns[PoolAudit] = {
    "POOL": lambda found: found.pool_id,
    "BLOCKS": lambda found: found.num_blocks,
    "FREE": lambda found: found.num_free,
    "CACHED": lambda found: found.num_cached,
    "HELD": lambda found: found.num_held,
    "HOLDERS": lambda found: found.num_holders,
    "REFERENCES": lambda found: found.num_references,
    "LEDGER": lambda found: _ledger(found),
    "LAWS": lambda found: _laws(found),
}


def audit(
    gateway: OperationsFlags,
    pool: Annotated[str, Option(metavar="ID", help="default: all pools")] = "",
    as_json: Json = False,
) -> int:
    """Recount every block reference: exit status 1 if a law is broken."""
    with gateway.connect() as client:
        audits = client.audit(pool)
    print_items(as_json, _COLUMNS, audits)
    for found in audits:
        for violation in found.violations:
            print(f"quire: {found.pool_id}: {violation}", file=sys.stderr)
    return 1 if any(found.violations for found in audits) else 0


def _ledger(found: PoolAudit) -> str:
    """Whether the audit could check the ledger."""
    if found.recovering:
        return "recovering"
    return "checked" if found.ledger_checked else "too busy"


def _laws(found: PoolAudit) -> str:
    """Whether the laws hold."""
    if found.violations:
        return f"{len(found.violations)} broken"
    return "not known" if found.recovering else "hold"
