"""The state machine of the stores, with prefixes that are retained."""

from hypothesis import strategies as st
from hypothesis.stateful import rule

from tests.property.machine import StoresAgree
from tests.property.machine_inputs import HASHES_OF, LOST, PROMPTS, TENANTS

LIMITS = st.sampled_from([9, 9, 3, 1, 0])


class RetainingStoresAgree(StoresAgree):
    """Prefixes are retained, too."""

    num_retained = 0

    @rule(
        owner=st.sampled_from(["x", "y"]),
        name=st.sampled_from(["a", "b/c"]),
        tenant=TENANTS,
        prompt=st.sampled_from(PROMPTS),
        num_hashes=st.integers(0, 4),
        limits=st.tuples(LIMITS, LIMITS),
        ends=st.sampled_from([False, False, False, True]),
        lost=LOST,
    )
    def retain(
        self,
        owner: str,
        name: str,
        tenant: str,
        prompt: tuple[int, ...],
        num_hashes: int,
        limits: tuple[int, int],
        ends: bool,
        lost: bool,
    ) -> None:
        """No two retentions end at the same time, and each one in the middle between two steps.
        `ends`: then it is dropped."""
        self.num_retained += 1
        what = owner, name, 10_000 + 10 * self.num_retained
        hashes = tuple(HASHES_OF[tenant][number] for number in prompt[:num_hashes])
        self.send(lambda store: store.retain("pool", *what, hashes, limits), lost)
        if ends:
            self.send(lambda store: store.end_retention("pool", owner, name), lost)
