"""Reads the configuration of a checkpoint, whichever files hold it."""

from dataclasses import replace
from pathlib import Path

from services.model.config.json_fields import JsonFields
from services.model.config.model_config import (
    CONFIG_FILE,
    GENERATION_FILE,
    ModelConfig,
    model_config,
)
from services.model.gguf.config import gguf_config
from services.model.gguf.file import GgufFile, gguf_file
from services.runtime.errors import StartupError


def read_model_config(directory: Path | str) -> ModelConfig:
    """Read the configuration of a Hugging Face checkpoint, or of a GGUF file.

    StartupError, with file and field: a file is missing or not readable, the architecture is
    unknown, shapes contradict each other, or a feature is not supported.
    """
    directory = Path(directory)
    if (gguf := gguf_file(directory)) is not None:
        return gguf_config(GgufFile.read(gguf))
    if not directory.is_dir():
        raise StartupError(f"{directory}: no such checkpoint directory")
    config = JsonFields.read(directory / CONFIG_FILE)
    generation_path = directory / GENERATION_FILE
    generation = (
        JsonFields.read(generation_path)
        if generation_path.exists()
        else JsonFields(generation_path, {})
    )
    found = model_config(config, generation)
    if found.eos_token_ids:
        return found
    return replace(found, eos_token_ids=_eos_of_tokenizer(directory, found.vocab_size))


def _eos_of_tokenizer(directory: Path, vocab_size: int) -> tuple[int, ...]:
    """The end token that only the tokenizer's files name."""
    from services.model.text.tokenizer import Tokenizer, has_tokenizer  # rarely needed, and large

    if not has_tokenizer(directory):
        return ()
    tokenizer = Tokenizer.from_directory(directory)
    token_id = tokenizer.token_id(tokenizer.special_tokens.get("eos_token", ""))
    return () if token_id is None or token_id >= vocab_size else (token_id,)
