"""The arguments that the state machine of the stores draws."""

from dataclasses import dataclass
from itertools import chain

from hypothesis import strategies as st

from blockstore.records import PoolSpec
from blockstore.store import NO_TENANT

HASHES_OF = {
    tenant: tuple(bytes([first + number]) * 16 for number in range(8))
    for first, tenant in ((0, NO_TENANT), (8, "t"))
}
"""The hashes of the blocks of each tenant."""
HASHES = tuple(chain.from_iterable(HASHES_OF.values()))
TENANTS = st.sampled_from([NO_TENANT, NO_TENANT, "t"])
PROMPTS = ((0, 1, 2, 3), (0, 1, 4, 5), (6, 7))
"""The hashes of three prompts; the first two share two blocks."""
BRANCHES = st.lists(st.sampled_from([(2, 3), (4, 5), (2,), (4, 6), (1, 7), ()]), max_size=3)
"""Hashes with which several sequences continue after a prompt's first blocks."""

SPECS = st.builds(
    PoolSpec,
    pool_id=st.just("pool"),
    model=st.just("model"),
    fingerprint=st.just("fingerprint"),
    num_blocks=st.integers(1, 9),
    block_size=st.just(4),
    block_bytes=st.just(64),
    watermark_blocks=st.integers(0, 2),
)
# mostly right: a wrong one only shows that it is refused
EPOCH_OFF_BY = st.sampled_from([0, 0, 0, 0, 0, 0, 0, -1, 1])
LOST = st.booleans()
LEASES_S = st.sampled_from([10, 20])


@dataclass(frozen=True, slots=True)
class Asked:
    """The arguments of an allocation, for a repeated call."""

    worker_id: str
    order: int
    hashes: tuple[bytes, ...]
    num_blocks: int
    branches: tuple[tuple[bytes, ...], ...] = ()
