"""Random LoRA adapters, written by PEFT, and the greedy tokens of transformers with them."""

import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]


def make_adapter(directory: Path, checkpoint: Path, seed: int, **fields: Any) -> Path:
    """Write an adapter whose additions are as large as the model's own outputs: with small ones,
    most greedy tokens would be those of the model. `fields`: fields of `LoraConfig`."""
    fields = {"r": 8, "lora_alpha": 16, "target_modules": [*ATTENTION, *MLP], **fields}
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with warnings.catch_warnings(action="ignore"):  # of transformers, about PEFT's calls
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **fields))
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=draw) * 0.2)
    with warnings.catch_warnings(action="ignore"):
        model.save_pretrained(directory)
    return directory


class AdapterOracle:
    """transformers and PEFT in fp32. The adapter is not merged into the model's weights."""

    def __init__(self, checkpoint: Path, adapter: Path | None) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        if adapter is not None:
            with warnings.catch_warnings(action="ignore"):
                self._model = PeftModel.from_pretrained(self._model, adapter)

    @torch.inference_mode()
    def greedy(self, prompt: tuple[int, ...], num_tokens: int) -> tuple[list[int], Tensor]:
        """The greedy tokens, and the logits that each was drawn from."""
        tokens: list[int] = []
        logits = []
        for _ in range(num_tokens):
            ids = torch.tensor([[*prompt, *tokens]])
            logits.append(self._model(input_ids=ids).logits[0, -1])
            tokens.append(int(logits[-1].argmax()))
        return tokens, torch.stack(logits)
