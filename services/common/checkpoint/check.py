"""Checks whether Quire can serve a checkpoint, as far as its files tell: format, config, weights,
tokenizer, chat template."""

from pathlib import Path

from services.common.checkpoint.embedding_config import EmbeddingConfig
from services.common.checkpoint.weights import INDEX_FILE, SINGLE_FILE, checked_weights
from services.common.errors import StartupError
from services.common.gguf.config import check_tensors
from services.common.gguf.file import GgufFile, gguf_file
from services.common.text.chat_template import ChatTemplate
from services.common.text.model_config import ModelConfig
from services.common.text.tokenizer import Tokenizer

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
    """The checkpoint's configuration. StartupError: its format, config or weights are wrong, or not
    supported. Reads only the headers of the weights."""
    check_format(directory)
    config = ModelConfig.from_directory(directory)
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
