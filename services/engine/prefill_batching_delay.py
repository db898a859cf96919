"""Who comes together is computed together.

A step of prompts takes long, and nobody can join it once it has begun: who comes a moment later
waits for its end, and is then decoded in a batch of its own, which costs as much as decoding them
all. Those that come at once, or wait for the same prefix, come some milliseconds apart.

See ADR 92.
"""

_SHARE = 1 / 40
_PAUSE_S = 0.005
"""From one to the next: what their gateway and the store take for each."""

_LEAST_S = 0.0003
"""Waiting for less costs more than that: the thread sleeps and wakes up."""


class PrefillBatchingDelay:
    """Steps with room for more wait while others keep coming, and never longer than a fortieth of
    the time that they will take themselves."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._budget = max_num_batched_tokens
        self._s_per_token = 0.0

    def observe(self, num_tokens: int, duration_s: float) -> None:
        """A step has computed so many."""
        if num_tokens:
            self._s_per_token = duration_s / num_tokens

    def patience_s(self, num_tokens: int, waited_s: float) -> float:
        """How long to wait now for somebody to come, before a step of `num_tokens` that has waited
        so long already; 0: not at all. Nobody waits on a guess, before the first step."""
        if num_tokens >= self._budget:
            return 0.0
        left_s = _SHARE * num_tokens * self._s_per_token - waited_s
        return min(left_s, _PAUSE_S) if left_s > _LEAST_S else 0.0
