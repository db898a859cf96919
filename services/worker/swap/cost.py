"""Measures what swapping costs."""

_WEIGHT = 0.3
"""The weight of the newest measurement in a running mean."""


class SwapCost:
    """The measured time of swap-outs; a copy back is taken to cost the same. `block_s` is for each
    block, `fixed_s` for each swap of any size (answers of the store, waking a thread). Both are
    None before the first measurement."""

    def __init__(self) -> None:
        self.block_s: float | None = None
        self.fixed_s: float | None = None

    def observe(self, num_blocks: int, copying_s: float, total_s: float) -> None:
        """Record a swap-out of `num_blocks` that took `total_s`, `copying_s` of it for the copy."""
        self.fixed_s = _mean(self.fixed_s, total_s - copying_s)
        if num_blocks:
            self.block_s = _mean(self.block_s, copying_s / num_blocks)

    def is_below(self, num_blocks: int, num_tokens: int, prefill_ns_per_token: int) -> bool:
        """Whether copying `num_blocks` out and back takes less time than computing `num_tokens`.
        True while a measurement is missing, because only a swap can provide it."""
        if self.block_s is None or self.fixed_s is None or not prefill_ns_per_token:
            return True
        swap_s = 2 * (num_blocks * self.block_s + self.fixed_s)
        return swap_s < num_tokens * prefill_ns_per_token * 1e-9


def _mean(before: float | None, value: float) -> float:
    return value if before is None else before + _WEIGHT * (value - before)
