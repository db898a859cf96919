"""Quantizes a checkpoint to int8 (W8A8) as compressed-tensors does; run by vLLM's interpreter.

    python vllm_int8.py CHECKPOINT DIRECTORY

Weights of the layers' linears: symmetric, a scale per row. Activations: per token, as they come.
Embedding and head stay as they are.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_SCHEME = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "channel",
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


def quantized(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each `*_proj.weight` [out, in] becomes int8 with a `weight_scale` [out, 1]."""
    result: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            result[name] = tensor
            continue
        weight = tensor.float()
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        result[name] = (weight / scale).round().to(torch.int8)
        result[f"{name}_scale"] = scale.to(tensor.dtype)
    return result


def main() -> None:
    checkpoint, directory = map(Path, sys.argv[1:])
    directory.mkdir(parents=True)
    for file in checkpoint.iterdir():
        if file.suffix == ".safetensors":
            save_file(quantized(load_file(file)), directory / file.name, {"format": "pt"})
        elif file.name != "model.safetensors.index.json":
            shutil.copy(file, directory)
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = _SCHEME
    (directory / "config.json").write_text(json.dumps(config, indent=2))


if __name__ == "__main__":
    main()
