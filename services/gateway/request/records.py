"""Keeps the records of the last requests, for `quire explain` and the dashboard.

Of a request's tokens a record keeps 8 bytes of a hash for each block, without salt, so that a later
request can be told why its prefix was not cached.
"""

from collections import OrderedDict
from collections.abc import Iterator

from blockstore.hashing import prefix_hashes
from services.gateway.request.record import HASH_BYTES, Record
from services.gateway.request.request import Request

MAX_RECORDS = 4096
MAX_BYTES = 32 << 20
"""The most memory of all records, as `Record.num_bytes` estimates it."""
_MAX_HASHED_BLOCKS = 512
"""Blocks of a longer prompt count as not seen: hashing takes a quarter of a millisecond for so
many."""


def block_hashes(request: Request) -> bytes:
    """The `Record.hashes` of a request; empty if it was not sent to a prefill worker."""
    if (placed := request.record.placed) is None:
        return b""
    most = _MAX_HASHED_BLOCKS * placed.block_size
    answer = request.output.sequences[0].tokens if request.output.sequences else []
    tokens = (*request.prompt_token_ids[:most], *answer)[:most]
    return b"".join(one[:HASH_BYTES] for one in prefix_hashes(b"", tokens, placed.block_size))


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
        name = record.caller.key, record.caller.host, record.request_id
        if (before := self._records.pop(name, None)) is not None:
            self._num_bytes -= before.num_bytes
        self._records[name] = record
        self._num_bytes += record.num_bytes
        while len(self._records) > MAX_RECORDS or self._num_bytes > MAX_BYTES:
            _, oldest = self._records.popitem(last=False)
            self._num_bytes -= oldest.num_bytes
