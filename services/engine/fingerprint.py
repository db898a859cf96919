"""What makes two workers' KV interchangeable, in one string: the root of every prefix hash."""

import json
from collections.abc import Mapping
from dataclasses import asdict

import torch
import xxhash

from services.common.text.model_config import ModelConfig


def fingerprint(
    config: ModelConfig,
    weights_digest: str,
    dtype: torch.dtype,
    block_size: int,
    numerics: Mapping[str, str],
) -> str:
    """32 hexadecimal digits: xxh3-128 over the configuration, every byte of the weight files
    (`weights.weights_digest`), the dtype they are computed in, the block size, and the kernels'
    numerics (`Backend.numerics`, quantization among them)."""
    facts = {
        "config": asdict(config),
        "weights": weights_digest,
        "dtype": str(dtype),
        "block_size": block_size,
        "numerics": dict(numerics),
    }
    return xxhash.xxh3_128_hexdigest(json.dumps(facts, sort_keys=True).encode())
