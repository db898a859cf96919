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

_DECAY = 0.9
"""The weight of a step when the next one is observed: some ten steps count."""

_LEAST_S = 0.0003
"""Shorter waits are left out: to put the thread to sleep and wake it takes longer."""


class PrefillBatchingDelay:
    """Decides how long the next step waits: as long as requests keep arriving, while the step has
    room for them, and at most a fortieth of its own expected time.

    A step of n tokens is expected to take a + b n, fitted to the last steps: on a GPU nearly all of
    a short step is a, its launches and the reading of all weights.
    """

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._budget = max_num_batched_tokens
        self._sums = [0.0] * 5
        """Of the observed steps, by weight: 1, n, seconds, n * n, n * seconds."""

    def observe(self, num_tokens: int, duration_s: float) -> None:
        """Note that a step has computed `num_tokens` tokens in `duration_s`."""
        if not num_tokens:
            return
        seen = (1, num_tokens, duration_s, num_tokens * num_tokens, num_tokens * duration_s)
        self._sums = [_DECAY * old + new for old, new in zip(self._sums, seen, strict=True)]

    def delay_s(self, num_tokens: int, waited_s: float) -> float:
        """How long to wait for the next request, if the step has `num_tokens` tokens to compute and
        has waited for `waited_s` already; 0: begin, as the first step does: its time is unknown."""
        if not 0 < num_tokens < self._budget:
            return 0.0
        left_s = _SHARE * self._expected_s(num_tokens) - waited_s
        return min(left_s, _PAUSE_S) if left_s > _LEAST_S else 0.0

    def _expected_s(self, num_tokens: int) -> float:
        """The time of a step of so many tokens; 0 if none was observed. If all steps had one size,
        a longer step counts as one of these, and a shorter one as its share of one."""
        weight, n_sum, s_sum, nn_sum, ns_sum = self._sums
        if not weight:
            return 0.0
        mean_n, mean_s = n_sum / weight, s_sum / weight
        variance = nn_sum / weight - mean_n * mean_n
        if variance < 1e-6 * mean_n * mean_n:
            return mean_s * min(1.0, num_tokens / mean_n)
        slope = max(0.0, (ns_sum / weight - mean_n * mean_s) / variance)
        if slope * mean_n > mean_s:  # a is not negative
            slope = mean_s / mean_n
        return max(0.0, mean_s + slope * (num_tokens - mean_n))
