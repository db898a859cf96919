"""Logprobs: log-softmax of the model's raw logits, before temperature, penalties and filters."""

from dataclasses import dataclass

MAX_LOGPROBS = 20
"""The most alternatives that a request can ask for beside each token."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The logprobs of the token at one position and of the likeliest tokens there, which are in
    falling order; of equal ones the lowest id comes first."""

    logprob: float
    rank: int
    """1 + the number of tokens with a larger logit."""
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()

    @property
    def num_entries(self) -> int:
        return 1 + len(self.top_token_ids)
