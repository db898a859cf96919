"""Checks that a draft model can draft for its target."""

from pathlib import Path

from services.model.checkpoint.check import check_weights
from services.model.config.model_config import ModelConfig
from services.model.text.tokenizer import has_tokenizer, read_tokenizer
from services.runtime.errors import StartupError


def draft_config(draft: Path, target: Path, config: ModelConfig, context: int) -> ModelConfig:
    """The configuration of a draft model for a target with this configuration, whose sequences have
    at most `context` tokens. A draft model of a shorter context is used up to its end.

    Raises StartupError if Quire cannot compute the draft model, or if it has other tokens.
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
