"""Audits a ledger in memory: recounts references from the holders' block lists and compares them
with counters, block states and prefix index."""

from collections import Counter
from collections.abc import Iterator

from blockstore.memory.blocks import Blocks
from blockstore.memory.ledger import Ledger
from blockstore.memory.shares import STARTS_MODULUS
from blockstore.records import AuditReport, PoolStats
from blockstore.store import NO_TENANT, QUARANTINE


def audit(ledger: Ledger) -> AuditReport:
    """Audit a ledger; each violation is a sentence with its numbers."""
    stats = ledger.stats()
    references = _references(ledger)
    is_whole = ledger.rebuilding.is_over
    violations = (
        *(check_conservation(stats) if is_whole else ()),
        *_check_counts(ledger.blocks, references),
        *(_check_states(ledger.blocks, references) if is_whole else ()),
        *_check_index(ledger.blocks),
        *_check_retentions(ledger),
        *_check_shares(ledger),
        *_check_workers(ledger),
    )
    return AuditReport.of(stats, references.total(), is_whole, violations)


def _references(ledger: Ledger) -> Counter[int]:
    return Counter(block_id for holder in ledger.holders.values() for block_id in holder.held)


def check_conservation(stats: PoolStats) -> Iterator[str]:
    free, cached, held = stats.num_free, stats.num_cached, stats.num_held
    if free + cached + held != stats.spec.num_blocks:
        yield f"free {free} + cached {cached} + held {held} is not {stats.spec.num_blocks}"


def _check_counts(blocks: Blocks, references: Counter[int]) -> Iterator[str]:
    for block_id in sorted(references.keys() | blocks.refs.keys()):
        counted, recorded = references[block_id], blocks.refs.get(block_id, 0)
        if counted != recorded:
            yield f"block {block_id} has {counted} holders, but its ref count is {recorded}"


def _check_states(blocks: Blocks, references: Counter[int]) -> Iterator[str]:
    """Check that every block is in exactly one place: never used, returned, cached or held."""
    places = Counter(range(blocks.next_unused, blocks.num_blocks))
    places.update(blocks.returned)
    places.update(blocks.cached.keys())
    places.update(blocks.kept.keys())
    places.update(references.keys())
    for block_id in range(blocks.num_blocks):
        if places[block_id] != 1:
            yield f"block {block_id} is in {places[block_id]} places, not in 1"


def _check_index(blocks: Blocks) -> Iterator[str]:
    if len(blocks.index) != len(blocks.hash_of):
        yield f"{len(blocks.index)} hashes are indexed, {len(blocks.hash_of)} blocks carry one"
    for prefix_hash, block_id in blocks.index.items():
        if blocks.hash_of.get(block_id) != prefix_hash:
            yield f"hash {prefix_hash.hex()} leads to block {block_id}, which does not carry it"
        if not any(block_id in each for each in (blocks.refs, blocks.cached, blocks.kept)):
            yield f"block {block_id} is indexed, but neither held nor cached"
    for block_id in (*blocks.cached, *blocks.kept):
        if block_id not in blocks.hash_of:
            yield f"block {block_id} is cached without a hash"


def _check_retentions(ledger: Ledger) -> Iterator[str]:
    """Check that the cached blocks that are evicted last are those with a retained hash; recount
    the retentions of each hash, and the hashes of each owner."""
    blocks, retentions = ledger.blocks, ledger.retentions
    for order, is_kept in ((blocks.cached, False), (blocks.kept, True)):
        for block_id in order:
            if (blocks.hash_of.get(block_id) in blocks.retained) != is_kept:
                place, which = ("last", "no") if is_kept else ("first", "a")
                yield f"block {block_id} is evicted {place}, but has {which} retained hash"
    counted = Counter(each for entry in retentions.values() for each in entry.hashes)
    for prefix_hash in counted.keys() | blocks.retained.keys():
        recorded, _ = blocks.retained.get(prefix_hash, (0, ""))
        if counted[prefix_hash] != recorded:
            yield f"hash {prefix_hash.hex()} has {counted[prefix_hash]} retentions, not {recorded}"
    charged = Counter(owner for _, owner in blocks.retained.values())
    for owner in charged.keys() | retentions.charged.keys():
        if charged[owner] != retentions.charged[owner]:
            number = retentions.charged[owner]
            yield f"{owner} retains {charged[owner]} hashes, but is charged for {number}"


def _check_shares(ledger: Ledger) -> Iterator[str]:
    """Check that no block has holders of two tenants; recount the blocks of each tenant, and add up
    the shares."""
    blocks, payers = ledger.blocks, dict[int, str]()
    for holder in ledger.holders.values():
        of_quarantine = holder.holder_id.startswith(QUARANTINE)
        for block_id in () if of_quarantine else holder.held:
            if (tenant := payers.setdefault(block_id, holder.tenant)) != holder.tenant:
                yield f"block {block_id} is held for the tenants {tenant} and {holder.tenant}"
    held = (payers.get(each) or blocks.payers.get(each, NO_TENANT) for each in blocks.refs)
    kept = (blocks.retained.get(blocks.hash_of.get(each, b""), (0, ""))[1] for each in blocks.kept)
    counted, shares = Counter([*held, *kept]), blocks.shares
    recorded = Counter({name: account.num_blocks for name, account in shares.tenants.items()})
    for tenant in counted.keys() | recorded.keys():
        if counted[tenant] != recorded[tenant]:
            yield f"{tenant} uses {counted[tenant]} blocks, but is charged for {recorded[tenant]}"
    sum_ms = sum(account.starts for account in shares.tenants.values())
    if (sum_ms - shares.pool.starts) % STARTS_MODULUS:
        yield f"the uses of tenants' blocks start at {sum_ms} ms, not {shares.pool.starts}"
    if counted.total() != shares.pool.num_blocks:
        yield f"{counted.total()} blocks are used, but {shares.pool.num_blocks} are counted"


def _check_workers(ledger: Ledger) -> Iterator[str]:
    """Check that every holder has a registered worker (law 3), every waiter a registered worker
    that is not fenced, and every demand a holder."""
    for holder in ledger.holders.values():
        if holder.worker_id not in ledger.workers:
            yield f"holder {holder.holder_id} has worker {holder.worker_id}, which is not there"
    for holder_id, waiter in ledger.waiters.items():
        if ledger.workers.get(waiter.worker_id) is not False:
            yield f"waiter {holder_id} has worker {waiter.worker_id}, which is gone or fenced"
    for holder_id in sorted(ledger.demands - ledger.holders.keys()):
        yield f"holder {holder_id} is demanded, but holds nothing"
