"""The fingerprint: the facts that make the KV of two workers interchangeable, hashed into one
string. The root of every prefix hash depends on it."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace

import torch
import xxhash

from services.model.config.model_config import GenerationDefaults, ModelConfig


def fingerprint(
    config: ModelConfig,
    weights_digest: str,
    dtype: torch.dtype,
    block_size: int,
    numerics: Mapping[str, str],
) -> str:
    """The fingerprint of a model at a worker, 32 hexadecimal digits.

    It is xxh3-128 over the model configuration (without default sampling parameters, which no KV
    depends on), the digest of all weight files (`weights_digest` in
    `services.engine.weights.checkpoint`), the dtype of the computation, the block size, and the
    kernels' numerics (`Backend.numerics`, which include the quantization).
    """
    facts = {
        "config": asdict(replace(config, generation=GenerationDefaults())),
        "weights": weights_digest,
        "dtype": str(dtype),
        "block_size": block_size,
        "numerics": dict(numerics),
    }
    return xxhash.xxh3_128_hexdigest(json.dumps(facts, sort_keys=True).encode())
