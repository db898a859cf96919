"""Loads what the gateway needs of a model: configuration, tokenizer and chat template."""

from dataclasses import dataclass, replace
from pathlib import Path

from services.common.text.chat_template import ChatTemplate
from services.common.text.model_config import ModelConfig
from services.common.text.tokenizer import Tokenizer
from services.gateway.intake.generation_config import GenerationConfig
from services.gateway.intake.structures import StructureChecker


@dataclass(frozen=True, slots=True)
class Model:
    """A model as the gateway sees it, without weights."""

    config: ModelConfig
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    """None if the checkpoint has no chat template."""
    structures: StructureChecker


def load_model(directory: str, generation: GenerationConfig | None = None) -> Model:
    """Loads a model from its directory. Takes up to seconds for a large vocabulary. `generation`:
    the deployment's own; None: the model's.

    StartupError: files are missing or wrong.
    """
    path = Path(directory)
    tokenizer = Tokenizer.from_directory(path)
    config = ModelConfig.from_directory(path)
    if generation is not None:
        config = replace(config, generation=generation.defaults(config.generation))
    return Model(
        config=config,
        tokenizer=tokenizer,
        chat_template=ChatTemplate.from_directory(path, tokenizer.special_tokens),
        structures=StructureChecker(path, config.vocab_size, config.eos_token_ids),
    )
