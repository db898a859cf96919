"""The setting `speculative_config`, as users of vLLM know it."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.engine.speculation.ngram import NgramDrafter
from services.engine.speculation.speculation import Speculation


class SpeculativeConfig(BaseModel):
    """Where drafts come from, and how many a row gets in a step at most.

    A bound of the n-grams that is missing is the other one; without both, n-grams have
    2 to 5 tokens.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: Literal["ngram"]
    num_speculative_tokens: int = Field(ge=1, le=64)
    prompt_lookup_min: int | None = Field(default=None, ge=1, le=64)
    prompt_lookup_max: int | None = Field(default=None, ge=1, le=64)

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        shortest, longest = self.ngram_sizes
        if shortest > longest:
            raise ValueError(f"prompt_lookup_min {shortest} is above prompt_lookup_max {longest}")
        return self

    @property
    def ngram_sizes(self) -> tuple[int, int]:
        """The shortest and the longest n-gram."""
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if low is None and high is None:
            return 2, 5
        return low or high or 0, high or low or 0

    def speculation(self) -> Speculation:
        return Speculation(NgramDrafter(*self.ngram_sizes), self.num_speculative_tokens)
