"""Reads the files of a LoRA adapter, as PEFT writes them: adapter_config.json and
adapter_model.safetensors. Nothing of the weights but their names, shapes and digest is read here.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.checkpoint.layout import Shape, weight_shapes
from services.common.checkpoint.weights import read_header
from services.common.errors import InvalidRequest, StartupError
from services.common.text.model_config import ModelConfig

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_NAME = re.compile(r"base_model\.model\.(?P<linear>.+)\.lora_(?P<side>[AB])\.weight")
_LINEARS = tuple(
    f".{name}_proj"
    for name in (
        *("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o"),
        *("mlp.gate", "mlp.up", "mlp.down"),
    )
)
_FLOATS = ("F32", "F16", "BF16")
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none", None),
    "use_dora": (False, None),
    "modules_to_save": (None, []),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, []),
    "megatron_config": (None,),
    "use_qalora": (False, None),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
}
"""Fields of adapter_config.json that change the arithmetic, with the values that are supported."""
_CHANGES_BASE = ("pissa", "olora", "loftq", "corda")
"""Values of `init_lora_weights` with which training changes the base model's weights too."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter that fits a model. `linears`: the names of the linears that it adds to, with the
    rank of each. `scale`: what B (A x) is multiplied by. `digest`: of both files."""

    directory: Path
    linears: Mapping[str, int]
    scale: float
    digest: str

    @property
    def rank(self) -> int:
        return max(self.linears.values())

    @property
    def weights(self) -> Path:
        return self.directory / WEIGHTS_FILE

    @classmethod
    def read(cls, directory: Path, config: ModelConfig, max_rank: int) -> "AdapterFiles":
        """InvalidRequest, with file and field: the adapter is unreadable, is not for this model,
        has features that are not supported, or a rank above `max_rank`."""
        try:
            fields = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
            if not isinstance(fields, dict):
                raise ValueError("not a JSON object")
            header = read_header(directory / WEIGHTS_FILE)
            digest = _digest(directory)
        except OSError as error:
            raise _refused(directory, f"{error.filename}: {error.strerror}") from error
        except (ValueError, StartupError) as error:
            raise _refused(directory, str(error)) from error
        _check_config(directory, fields)
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in header.items()}
        linears = _linears(directory, shapes, weight_shapes(config))
        files = cls(directory, linears, _scale(directory, fields), digest)
        if files.rank > max_rank:
            raise _refused(directory, f"rank {files.rank} is above max_lora_rank {max_rank}")
        return files


def _refused(directory: Path, problem: str) -> InvalidRequest:
    return InvalidRequest(f"adapter {directory}: {problem}", "lora_path")


def _check_config(directory: Path, fields: Mapping[str, Any]) -> None:
    for name, supported in _PLAIN.items():
        if (value := fields.get(name, supported[0])) not in supported:
            raise _refused(directory, f"{name} {value!r} is not supported")
    initial = fields.get("init_lora_weights", True)
    if isinstance(initial, str) and initial.lower().startswith(_CHANGES_BASE):
        raise _refused(directory, f"init_lora_weights {initial!r} changes the base model's weights")


def _scale(directory: Path, fields: Mapping[str, Any]) -> float:
    rank, alpha = fields.get("r"), fields.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise _refused(directory, f"r is {rank!r}, lora_alpha {alpha!r}")
    return alpha / (math.sqrt(rank) if fields.get("use_rslora") else rank)


def _linears(
    directory: Path, tensors: Mapping[str, tuple[Shape, str]], base: Mapping[str, Shape]
) -> dict[str, int]:
    """The rank of each linear; every tensor is checked against the base model's."""
    found: dict[str, dict[str, Shape]] = {}
    for name, (shape, dtype) in tensors.items():
        match = _NAME.fullmatch(name)
        wanted = base.get(f"{match['linear']}.weight", ()) if match else ()
        if match is None or len(wanted) != 2 or not match["linear"].endswith(_LINEARS):
            linears = ", ".join(one.rpartition(".")[2] for one in _LINEARS)
            raise _refused(directory, f"{name} is not for one of this model's {linears}")
        if dtype not in _FLOATS or len(shape) != 2:
            raise _refused(directory, f"{name} has shape {list(shape)} and dtype {dtype}")
        found.setdefault(match["linear"], {})[match["side"]] = shape
    ranks = {}
    for linear, sides in found.items():
        n, k = base[f"{linear}.weight"]
        if set(sides) != {"A", "B"}:
            raise _refused(directory, f"{linear} has only lora_{''.join(sides)}")
        rank = sides["A"][0]
        if rank < 1 or sides["A"] != (rank, k) or sides["B"] != (n, rank):
            a, b = list(sides["A"]), list(sides["B"])
            raise _refused(directory, f"{linear} is [{n}, {k}], lora_A {a}, lora_B {b}")
        ranks[linear] = rank
    if not ranks:
        raise _refused(directory, "no lora_A and lora_B weights")
    return ranks


def _digest(directory: Path) -> str:
    import xxhash  # a check of a GPU imports this module, and has no xxhash

    digest = xxhash.xxh3_128()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        content = (directory / name).read_bytes()
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()
