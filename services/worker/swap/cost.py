"""What swapping a sequence costs, and what computing it again would, both as measured.

See ADR 55.
"""

_WEIGHT = 0.3
"""Of the newest measurement in a running mean."""

_FEW_TOKENS = 32
"""A step of fewer costs about the same however many they are: it says nothing of a prompt's."""


class SwapCost:
    """Seconds: for each block copied, and for each swap whatever its size (answers of the store,
    waking a thread)."""

    def __init__(self) -> None:
        self.block_s: float | None = None
        self.fixed_s: float | None = None

    def observe(self, num_blocks: int, copying_s: float, total_s: float) -> None:
        """A swap copied so many blocks; the rest of its time was spent on something else."""
        self.fixed_s = _mean(self.fixed_s, total_s - copying_s)
        if num_blocks:
            self.block_s = _mean(self.block_s, copying_s / num_blocks)

    def is_below(self, num_blocks: int, num_tokens: int, prefill_ns_per_token: int) -> bool:
        """Whether copying `num_blocks` out and back takes less than computing `num_tokens`. What
        nobody has measured yet is tried: there is no other way to measure it."""
        if self.block_s is None or self.fixed_s is None or not prefill_ns_per_token:
            return True
        swap_s = 2 * (num_blocks * self.block_s + self.fixed_s)
        return swap_s < num_tokens * prefill_ns_per_token * 1e-9


class Pace:
    """Time that a prompt's token takes, over the last steps that were long enough to tell."""

    def __init__(self) -> None:
        self._s_per_token: float | None = None

    def observe(self, num_tokens: int, duration_s: float) -> None:
        if num_tokens >= _FEW_TOKENS:
            self._s_per_token = _mean(self._s_per_token, duration_s / num_tokens)

    @property
    def ns_per_token(self) -> int:
        """0: not known yet."""
        return 0 if self._s_per_token is None else max(1, round(self._s_per_token * 1e9))


def _mean(before: float | None, value: float) -> float:
    return value if before is None else before + _WEIGHT * (value - before)
