"""The setting `speculative_config`, as users of vLLM know it."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from quire.sizes import memory_size

_OF_METHOD = {
    "ngram": ("prompt_lookup_min", "prompt_lookup_max"),
    "draft_model": ("model", "draft_kv_memory"),
}


class SpeculativeConfig(BaseModel):
    """Where drafts come from, and how many a row gets in a step at most. A missing bound of the
    n-grams is equal to the other bound; without both, n-grams have 1 to 5 tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    method: Literal["ngram", "draft_model"]
    num_speculative_tokens: int = Field(ge=1, le=64)
    prompt_lookup_min: int | None = Field(default=None, ge=1, le=64)
    prompt_lookup_max: int | None = Field(default=None, ge=1, le=64)
    model: Path | None = None
    """The checkpoint of the draft model."""
    draft_kv_memory: str = "1GiB"
    """The most memory of the draft model's KV in each decode worker."""

    @model_validator(mode="before")
    @classmethod
    def _infer_method(cls, values: Any) -> Any:
        if isinstance(values, dict) and "model" in values:
            return {"method": "draft_model", **values}
        return values

    @field_validator("model")
    @classmethod
    def _expand_home(cls, path: Path | None) -> Path | None:
        return None if path is None else path.expanduser()

    @field_validator("draft_kv_memory")
    @classmethod
    def _check_size(cls, size: str) -> str:
        return memory_size(size)

    @model_validator(mode="after")
    def _check_method(self) -> Self:
        for method, names in _OF_METHOD.items():
            if method != self.method and (wrong := self.model_fields_set.intersection(names)):
                raise ValueError(f"{sorted(wrong)[0]} is for the method {method}")
        if self.method == "draft_model" and self.model is None:
            raise ValueError(
                "the method draft_model needs a model: the directory of its checkpoint"
            )
        shortest, longest = self.ngram_sizes
        if shortest > longest:
            raise ValueError(f"prompt_lookup_min {shortest} is above prompt_lookup_max {longest}")
        return self

    @property
    def ngram_sizes(self) -> tuple[int, int]:
        """The shortest and the longest n-gram."""
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if low is None and high is None:
            return 1, 5
        return low or high or 0, high or low or 0


def check_speculative_config(text: str) -> str:
    """Return the JSON `text` if workers take it. Raises ValueError if they would refuse it."""
    try:
        SpeculativeConfig.model_validate_json(text)
    except ValidationError as error:
        problems = (
            ": ".join([*map(str, each["loc"]), each["msg"].removeprefix("Value error, ")])
            for each in error.errors()
        )
        raise ValueError("; ".join(problems)) from error
    return text
