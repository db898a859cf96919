"""The setting `speculative_config`, as users of vLLM know it."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from services.common.checkpoint.check import check_weights
from services.common.errors import StartupError
from services.common.pool.sizing import parse_size
from services.common.text.model_config import ModelConfig
from services.common.text.tokenizer import has_tokenizer, read_tokenizer

_OF_METHOD = {
    "ngram": ("prompt_lookup_min", "prompt_lookup_max"),
    "draft_model": ("model", "draft_kv_memory"),
}


class SpeculativeConfig(BaseModel):
    """Where drafts come from, and how many a row gets in a step at most.

    A bound of the n-grams that is missing is the other one; without both, n-grams have
    1 to 5 tokens. `model`: the checkpoint of the draft model. `draft_kv_memory`: the most memory of
    its KV in each decode worker.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    method: Literal["ngram", "draft_model"]
    num_speculative_tokens: int = Field(ge=1, le=64)
    prompt_lookup_min: int | None = Field(default=None, ge=1, le=64)
    prompt_lookup_max: int | None = Field(default=None, ge=1, le=64)
    model: Path | None = None
    draft_kv_memory: str = "1GiB"

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
        parse_size(size)
        return size

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


def draft_config(draft: Path, target: Path, config: ModelConfig, context: int) -> ModelConfig:
    """The configuration of a draft model for a target with this configuration, whose sequences have
    at most `context` tokens. A draft model of a shorter context is used up to its end.

    StartupError: Quire cannot compute the draft model, or its tokens are not the target's.
    """
    found = check_weights(draft)
    if found.vocab_size != config.vocab_size:
        raise StartupError(
            f"the draft model {draft} has a vocabulary of {found.vocab_size} tokens, and the model "
            f"{target} one of {config.vocab_size}: choose a draft model of the same family"
        )
    if has_tokenizer(draft) and has_tokenizer(target):
        _check_same_tokens(draft, target)
    return found.for_context(min(context, found.max_position_embeddings))


def _check_same_tokens(draft: Path, target: Path) -> None:
    ids, others = (
        read_tokenizer(path).get_vocab(with_added_tokens=True) for path in (draft, target)
    )
    different = {token for token, _ in ids.items() ^ others.items()}
    if different:
        token = min(different, key=lambda one: min(ids.get(one, 1 << 31), others.get(one, 1 << 31)))
        raise StartupError(
            f"the draft model {draft} has other tokens than the model {target}: {len(different)} "
            f"differ, such as {token!r}, which is {ids.get(token, 'none')} there and "
            f"{others.get(token, 'none')} here"
        )
