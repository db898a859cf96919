"""Loads a checkpoint's tensors from memory-mapped safetensors files, one file or several.

A tensor that is not converted is a view of the mapped file: it costs no private memory, and all
workers of a host share its pages.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.engine.sequences.pooling import ScoreHead
from services.engine.weights.gguf_weights import load_gguf
from services.engine.weights.llama_order import as_llama
from services.engine.weights.stacked_experts import with_single_experts
from services.engine.weights.stored_linears import decoded
from services.engine.weights.weights import Form, Weight, Weights
from services.model.checkpoint.embedding_config import EmbeddingConfig
from services.model.checkpoint.stored_tensors import mark
from services.model.checkpoint.weights import checked_weights, read_header, weight_files
from services.model.config.layout import EMBEDDING, HEAD, SCORE_HEAD, Shape, weight_shapes
from services.model.config.model_config import ModelConfig
from services.model.gguf.file import gguf_file
from services.runtime.errors import StartupError

_DIGESTED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SafetensorsWeights:
    """`Weights` of safetensors files."""

    tensors: Mapping[str, Tensor]
    """All tensors, as they are in the files."""
    config: ModelConfig
    shapes: Mapping[str, Shape]
    """The shapes that the weights have when they are not quantized."""

    def form(self, linear: str) -> Form:
        stored = self.config.quantization
        return stored.kind or "float" if stored and self._is_quantized(linear) else "float"

    def linear(self, linear: str) -> Weight:
        stored = self.config.quantization
        if stored is None or not self._is_quantized(linear):
            return self.tensors[f"{linear}.weight"]
        n, k = self.shapes[f"{linear}.weight"]
        return decoded(stored, linear, lambda part: self.tensors.get(f"{linear}.{part}"), n, k)

    def _is_quantized(self, linear: str) -> bool:
        stored = self.config.quantization
        return stored is not None and mark(stored, linear, self.tensors) is not None


def load_weights(
    directory: Path, config: ModelConfig, embedding_dtype: torch.dtype = torch.bfloat16
) -> Weights:
    """The weights of a checkpoint, in safetensors files or in a GGUF file, as Llama names and
    orders them. A GGUF file's quantized embedding is dequantized to `embedding_dtype`.

    Raises StartupError if a file cannot be read, or as `checked_weights` and `check_tensors` do.
    """
    if (gguf := gguf_file(directory)) is not None:
        return load_gguf(gguf, config, embedding_dtype)
    tensors: dict[str, Tensor] = {}
    for path, names in checked_weights(directory, config).items():
        try:
            with safe_open(path, framework="pt") as file:
                tensors |= {name: file.get_tensor(name) for name in names}
        except (SafetensorError, OSError) as exc:
            raise StartupError(f"{path}: not a readable safetensors file: {exc}") from exc
    if config.tied_embeddings:
        _check_tied(directory, tensors[EMBEDDING])
    shapes = weight_shapes(config)
    for name in tensors.keys() - shapes.keys():
        if name.endswith(".bias"):
            if torch.any(tensors[name]):
                raise StartupError(f"{directory}: {name}: a bias that the config does not have")
            del tensors[name]
    weights = with_single_experts(SafetensorsWeights(tensors, config, shapes), config)
    return as_llama(weights, config)


def read_score_head(directory: Path, config: ModelConfig) -> ScoreHead | None:
    """The head of a cross-encoder; None for any other model. Raises StartupError."""
    if not config.is_cross_encoder:
        return None
    files = checked_weights(directory, config).items()
    with safe_open(next(path for path, names in files if SCORE_HEAD in names), "pt") as file:
        weight = file.get_tensor(SCORE_HEAD)[0].double().numpy()
    return ScoreHead(weight, EmbeddingConfig.from_directory(directory).score == "sigmoid")


def _check_tied(directory: Path, embedding: Tensor) -> None:
    """Raises StartupError if the checkpoint has a head that is another matrix than the embedding:
    transformers would not tie them, whatever the config says."""
    for path in weight_files(directory):
        if HEAD not in read_header(path):
            continue
        with safe_open(path, framework="pt") as file:
            head = file.get_tensor(HEAD)
        if not torch.equal(head.to(embedding.dtype), embedding):
            raise StartupError(
                f"{path}: {HEAD} differs from {EMBEDDING}, but they are one matrix by "
                "tie_word_embeddings (config.json, or its default); set it to false, or remove "
                f"{HEAD}"
            )


def weights_digest(directory: Path, progress: Callable[[], None] = lambda: None) -> str:
    """xxh3-128 over every byte of the weight files, in hexadecimal. The disk limits its speed, or
    memory (20 GB/s) if the files are in the page cache. Raises StartupError for unreadable
    files."""
    digest = xxhash.xxh3_128()
    piece = memoryview(bytearray(_DIGESTED_BYTES))
    for path in weight_files(directory):
        try:
            # The length comes first: otherwise bytes that move between files change nothing.
            digest.update(path.stat().st_size.to_bytes(8, "little"))
            with path.open("rb", buffering=0) as file:
                while num_bytes := file.readinto(piece):
                    digest.update(piece[:num_bytes])
                    progress()
        except OSError as exc:
            raise StartupError(f"{path}: {exc.strerror}") from exc
    return digest.hexdigest()
