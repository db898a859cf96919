"""What the gateway knows of a model: its text and configuration, from the model's directory."""

from dataclasses import dataclass
from pathlib import Path

from services.common.text.chat_template import ChatTemplate
from services.common.text.model_config import ModelConfig
from services.common.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Model:
    """`chat_template` is None where the checkpoint has none."""

    config: ModelConfig
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None


def load_model(directory: str) -> Model:
    """StartupError: files are missing or wrong. Takes up to seconds for a large vocabulary."""
    path = Path(directory)
    tokenizer = Tokenizer.from_directory(path)
    return Model(
        config=ModelConfig.from_directory(path),
        tokenizer=tokenizer,
        chat_template=ChatTemplate.from_directory(path, tokenizer.special_tokens),
    )
