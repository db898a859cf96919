"""Records of the last requests: what `quire explain` and the dashboard tell of them.

A record has no prompt and no answer. Of their tokens it keeps 8 bytes of a hash for each block,
without salt, so that a later request can be told why its prefix was not cached.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from blockstore.hashing import prefix_hashes
from services.gateway.access.caller import Caller
from services.gateway.identity import MAX_ID_CHARS, client_id
from services.gateway.output.output import RequestStats
from services.gateway.request.events import Computed
from services.gateway.request.request import Request
from services.gateway.request.timeline import Timeline

MAX_RECORDS = 4096
MAX_BYTES = 32 << 20
"""The most memory of all records, as `Record.num_bytes` estimates it."""
_MAX_HASHED_BLOCKS = 512
"""Blocks of a longer prompt count as not seen: hashing takes a quarter of a millisecond for so
many."""
_HASH_BYTES = 8
_RECORD_BYTES, _EVENT_BYTES, _ITEM_BYTES = 2048, 384, 448
"""Upper bounds of the memory of a record, of one event, and of one item that an event lists."""
_MAX_TEXT_CHARS = 400


class Root(NamedTuple):
    """The values that two requests must share, beside the tokens, to share cached blocks."""

    cache_salt: int
    """The hash of the cache salt, with the tenant."""
    adapter: str
    fingerprint: str
    pool: str


@dataclass(frozen=True, slots=True)
class Record:
    """One request: what is known at its end, or now."""

    request_id: str
    """The client's id."""
    caller: tuple[str, str]
    """The name of the API key that it came with, and without keys the client's address."""
    timeline: Timeline
    stats: RequestStats | None = None
    """None if the request was refused before it was queued."""
    order: int = 0
    """See `queue_order`."""
    model: str = ""
    num_sequences: int = 1
    root: Root | None = None
    """None if the request was not sent to a prefill worker."""
    hashes: bytes = b""
    """8 bytes for each full block of the prompt and of the first sequence; empty while it runs."""
    outcome: str = ""
    """A finish reason, an error code, or `cancelled`; empty while the request runs."""
    reason: str = ""
    """The text of the error."""

    @property
    def num_bytes(self) -> int:
        """An upper bound of its memory."""
        events = [event for _, event in self.timeline.events]
        lists = ("workers", "prefill", "decode", "holders")
        num_items = sum(len(getattr(event, name, ())) for event in events for name in lists)
        num_bytes = _RECORD_BYTES + _EVENT_BYTES * len(events) + _ITEM_BYTES * num_items
        return num_bytes + len(self.hashes)

    @property
    def ended_ms(self) -> int:
        """When it ended; now while it runs."""
        return self.timeline.time_ms(self.timeline.age_s)

    @property
    def computed_ms(self) -> int:
        """When its prompt was first computed; 0 if it was not."""
        events = self.timeline.events
        times = (at_s for at_s, event in events if isinstance(event, Computed))
        return next(map(self.timeline.time_ms, times), 0)

    def block(self, index: int) -> bytes:
        """The hash of the tokens up to this block; empty if the record does not have it."""
        return self.hashes[_HASH_BYTES * index : _HASH_BYTES * (index + 1)]

    def is_visible_to(self, caller: Caller) -> bool:
        """Operators see all requests, a key its own, and without keys a host its own."""
        return caller.is_operator or self.caller == (caller.key, caller.host)


def record_of(request: Request, outcome: str = "", reason: str = "", hashes: bytes = b"") -> Record:
    """The record of a request that runs, or that has ended with this outcome. `block_hashes` makes
    the `hashes`."""
    caller, placed = request.asked.caller, request.timeline.placed
    adapter = request.adapter.digest if request.adapter else ""
    return Record(
        client_id(request.id),
        (caller.key, caller.host),
        request.timeline,
        request.output.stats,
        request.order,
        request.model,
        request.sampling.n or 1,
        None if placed is None else Root(hash(request.cache_salt), adapter, *placed.home),
        hashes,
        outcome,
        reason[:_MAX_TEXT_CHARS],
    )


def block_hashes(request: Request) -> bytes:
    """The `Record.hashes` of a request; empty if it was not sent to a prefill worker."""
    if (placed := request.timeline.placed) is None:
        return b""
    most = _MAX_HASHED_BLOCKS * placed.block_size
    answer = request.output.sequences[0].tokens if request.output.sequences else []
    tokens = (*request.prompt_token_ids[:most], *answer)[:most]
    return b"".join(one[:_HASH_BYTES] for one in prefix_hashes(b"", tokens, placed.block_size))


def refused(request_id: str, code: str, reason: str, caller: Caller) -> Record:
    """The record of a request that was refused before it was queued."""
    name, who = request_id[:MAX_ID_CHARS], (caller.key, caller.host)
    return Record(name, who, Timeline(), outcome=code, reason=reason[:_MAX_TEXT_CHARS])


class Records:
    """The records of the requests that ended last at this gateway, within both bounds."""

    def __init__(self) -> None:
        self._records: OrderedDict[tuple[str, str, str], Record] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        """The latest first."""
        return reversed(self._records.values())

    def add(self, record: Record) -> None:
        """Add a record in place of an earlier one of the same client and id."""
        name = *record.caller, record.request_id
        if (before := self._records.pop(name, None)) is not None:
            self._num_bytes -= before.num_bytes
        self._records[name] = record
        self._num_bytes += record.num_bytes
        while len(self._records) > MAX_RECORDS or self._num_bytes > MAX_BYTES:
            _, oldest = self._records.popitem(last=False)
            self._num_bytes -= oldest.num_bytes
