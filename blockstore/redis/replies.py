"""Encodes arguments for the functions in functions/*.lua, and decodes their replies."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from blockstore.memory.shares import Account, Shares
from blockstore.records import (
    Asserted,
    Claim,
    Content,
    HolderInfo,
    PoolSpec,
    PoolStats,
    PrefixHash,
    Retention,
    Wait,
)
from blockstore.redis.connection import Argument

REASSERT_PAGE = 4096
"""A call of `reassert` takes no more holders after this many arguments; the server needs a few
milliseconds for it."""


def pages_of(
    worker_id: str, holders: Sequence[Asserted], waits: Sequence[Wait]
) -> Iterator[list[Argument]]:
    """Yield the arguments of each call of the function `reassert`. The last call carries the waits
    and a 1."""
    waiting: list[Argument] = [len(waits)]
    for wait in waits:
        waiting += (wait.holder_id, wait.order, wait.released_epoch)
    page: list[Argument] = []
    for holder in holders:
        page += (holder.holder_id, holder.epoch, holder.order, holder.num_cached_blocks)
        page += (len(holder.block_ids), len(holder.given_back))
        page += (*holder.block_ids, *holder.given_back)
        if len(page) >= REASSERT_PAGE:
            yield [worker_id, 0, 0, *page]
            page = []
    yield [worker_id, 1, *waiting, *page]


def content_field(content: Content) -> Argument:
    """Encode a block's content for `restore`."""
    return content.prefix_hash or ("p" if content.private else "")


def ids(values: Sequence[bytes]) -> tuple[int, ...]:
    return tuple(map(int, values))


def names(values: Sequence[bytes]) -> tuple[str, ...]:
    return tuple(value.decode() for value in values)


def text_fields(flat: list[bytes]) -> dict[str, str]:
    return dict(zip(names(flat[::2]), names(flat[1::2]), strict=True))


def holder_info(reply: list[Any]) -> HolderInfo:
    holder_id, epoch, worker_id, order, num_blocks = reply
    return HolderInfo(holder_id.decode(), epoch, worker_id.decode(), order, num_blocks)


def retention(row: list[Any], hashes: Mapping[bytes, tuple[PrefixHash, ...]]) -> Retention:
    key, left_ms, num_blocks, num_cached = row
    owner, name = key.decode().split("/", 1)
    return Retention(owner, name, num_blocks, num_cached, left_ms, hashes.get(key, ()))


def claim(reply: list[Any]) -> Claim:
    """Decode the reply to `claim`; see functions/60_holding.lua."""
    epoch, _, _, num_acquired, *blocks = map(int, reply)
    acquired, given_back = blocks[:num_acquired], blocks[num_acquired:]
    return Claim.of(epoch, acquired, set(acquired).difference(given_back))


def pool_spec(pool_id: str, fields: dict[str, str]) -> PoolSpec:
    return PoolSpec(
        pool_id=pool_id,
        model=fields["model"],
        fingerprint=fields["fingerprint"],
        num_blocks=int(fields["num_blocks"]),
        block_size=int(fields["block_size"]),
        block_bytes=int(fields["block_bytes"]),
        watermark_blocks=int(fields["watermark"]),
    )


def shares(now: str, used: str, starts: str, fields: Mapping[str, str]) -> Shares:
    """Decode `read_shares` of functions/22_shares.lua."""
    numbers = {name: int(text) for name, text in fields.items()}
    tenants = [name for name in numbers if not name.endswith("/")]
    accounts = {name: Account(numbers[name], numbers[f"{name}/"]) for name in tenants}
    return Shares.of(lambda: int(now) / 1000, {**accounts, "": Account(int(used), int(starts))})


def _shares_among(fields: Mapping[str, str]) -> Shares:
    """Decode the shares among the fields of a pool's header."""
    of_tenants = {name[6:]: text for name, text in fields.items() if name.startswith("share/")}
    now, used, starts = fields["share_ms"], fields["share_used"], fields["share_starts"]
    return shares(now, used, starts, of_tenants)


def pool_stats(pool_id: str, reply: Sequence[Any]) -> tuple[PoolStats, str]:
    """Decode the reply to `stats`, and the run id of the server that made the ledger."""
    header, num_free, num_cached, num_held, num_holders, num_waiters, workers, missing = reply
    fields, fenced = text_fields(header), text_fields(workers)
    stats = PoolStats(
        spec=pool_spec(pool_id, fields),
        num_free=num_free,
        num_cached=num_cached,
        num_held=num_held,
        num_holders=num_holders,
        num_waiters=num_waiters,
        num_prefix_queries=int(fields["queries"]),
        num_prefix_hits=int(fields["hits"]),
        num_retained=int(fields.get("retained", 0)),
        worker_ids=tuple(sorted(fenced)),
        fenced_worker_ids=tuple(sorted(name for name in fenced if fenced[name] == "1")),
        ledger_epoch=int(fields["epoch"]),
        recovering="recovering" in fields,
        missing_worker_ids=tuple(sorted(names(missing))),
        num_accounted=int(fields["next"]),
        num_to_account=int(fields["top"]),
        made_ms=int(fields.get("made_ms", 0)),
        shares=_shares_among(fields).records() if "share_ms" in fields else (),
    )
    return stats, fields["run_id"]
