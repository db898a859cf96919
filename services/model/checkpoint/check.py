"""Checks whether Quire can serve a checkpoint, as far as its files tell: format, config, weights,
tokenizer, chat template."""

from pathlib import Path

from services.model.checkpoint.embedding_config import EmbeddingConfig
from services.model.checkpoint.reading import read_model_config
from services.model.checkpoint.weights import INDEX_FILE, SINGLE_FILE, checked_weights
from services.model.config.model_config import ModelConfig
from services.model.gguf.config import check_tensors
from services.model.gguf.file import GgufFile, gguf_file
from services.model.text.chat_template import ChatTemplate
from services.model.text.tokenizer import Tokenizer
from services.runtime.errors import StartupError

_OTHER_FORMATS = {
    "pytorch_model*.bin": "PyTorch's own format",
    "*.pth": "PyTorch's own format",
    "*.ckpt.index": "TensorFlow's format",
}


def check(directory: Path) -> None:
    """Raises StartupError, with the first reason, if Quire cannot serve this checkpoint."""
    check_weights(directory)
    tokenizer = Tokenizer.from_directory(directory)
    ChatTemplate.from_directory(directory, tokenizer.special_tokens)
    EmbeddingConfig.from_directory(directory)


def check_weights(directory: Path) -> ModelConfig:
    """Return the checkpoint's configuration; read only the headers of the weights. Raises
    StartupError if format, config or weights are wrong, or not supported."""
    check_format(directory)
    config = read_model_config(directory)
    if (gguf := gguf_file(directory)) is not None:
        check_tensors(GgufFile.read(gguf), config)
    else:
        checked_weights(directory, config)
    return config


def check_format(directory: Path) -> None:
    """Raises StartupError if the weights are in another format than safetensors or GGUF."""
    if gguf_file(directory) is not None:
        return
    if (directory / SINGLE_FILE).exists() or (directory / INDEX_FILE).exists():
        return
    for pattern, name in _OTHER_FORMATS.items():
        if found := sorted(directory.glob(pattern)):
            raise StartupError(
                f"{directory}: {found[0].name} is in {name}; Quire reads Hugging Face checkpoints "
                f"of {SINGLE_FILE}, or of several such files with {INDEX_FILE}, and GGUF files"
            )
