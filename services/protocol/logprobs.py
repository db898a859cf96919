"""What a model thought of a token: logarithms of softmax(logits), of the logits as they come from
the model, before temperature, penalties and filters."""

from dataclasses import dataclass

MAX_LOGPROBS = 20
"""Most of the likeliest tokens that can be asked for beside the one that is there."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of the token at one position. `rank`: 1 + how many tokens have a larger logit. The likeliest
    tokens come likeliest first, of equal ones the lowest id first; the i-th has rank i."""

    logprob: float
    rank: int
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()

    @property
    def num_entries(self) -> int:
        return 1 + len(self.top_token_ids)
