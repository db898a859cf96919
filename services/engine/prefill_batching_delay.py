"""Delays a prefill step briefly, so that prompts that arrive together are computed together.

A prefill step takes long, and no request can join it once it has begun. A request that arrives a
moment later waits for the end of the step, and is then decoded in a batch of its own, which costs
about as much as decoding all in one batch. Requests that are sent at once, or wait for the same
prefix, reach the engine some milliseconds apart.
"""

_SHARE = 1 / 40
"""The longest delay, as a share of the time that the step itself will take."""

_PAUSE_S = 0.005
"""How long to wait for the next request: about as long as gateway and store take for one."""

_LEAST_S = 0.0003
"""Shorter waits are left out: to put the thread to sleep and wake it takes longer."""


class PrefillBatchingDelay:
    """Decides how long the next step waits: as long as requests keep arriving, while the step has
    room for them, and at most a fortieth of its own expected time."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._budget = max_num_batched_tokens
        self._s_per_token = 0.0

    def observe(self, num_tokens: int, duration_s: float) -> None:
        """Note that a step has computed `num_tokens` tokens in `duration_s`."""
        if num_tokens:
            self._s_per_token = duration_s / num_tokens

    def delay_s(self, num_tokens: int, waited_s: float) -> float:
        """How long to wait for the next request, if the step has `num_tokens` tokens to compute and
        has waited for `waited_s` already; 0: begin, as the first step does: its time is unknown."""
        if num_tokens >= self._budget:
            return 0.0
        left_s = _SHARE * num_tokens * self._s_per_token - waited_s
        return min(left_s, _PAUSE_S) if left_s > _LEAST_S else 0.0
