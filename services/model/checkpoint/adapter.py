"""Reads the files of a LoRA adapter, as PEFT writes them: adapter_config.json and
adapter_model.safetensors. The weights are checked, and not kept.
"""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from quire.files import open_regular_file, read_small_file
from services.model.checkpoint.weights import StoredTensor, read_header
from services.model.config.json_fields import MAX_JSON_BYTES, parse_json
from services.model.config.layout import Shape, weight_shapes
from services.model.config.model_config import ModelConfig
from services.runtime.errors import InvalidRequest, StartupError

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
_FLOATS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""numpy's dtype of each dtype; it has none for bf16."""

_MAX_GROWTH = 2.0**30
"""How large an adapter may make inputs of 1. A trained adapter makes them up to some thousands. Far
beyond that, sums of squares overflow, and the logits are no numbers."""

_PIECE_BYTES = 1 << 20

_MAX_PATTERNS = 256
_MAX_REPEATS = 3
_REPEATS, _REPEATED_GROUP = re.compile(r"[*+?{]"), re.compile(r"\)[*+?{]")
"""Python's regular expressions backtrack: `(a+)+b` takes for ever to match a name."""

_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none", None),
    "use_dora": (False, None),
    "modules_to_save": (None, []),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
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
_IGNORED = (
    *("auto_mapping", "inference_mode", "target_modules", "exclude_modules", "layers_to_transform"),
    *("layers_pattern", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config"),
    *("runtime_config", "ensure_weight_tying"),
)
"""Other fields that may be true, a list or an object: fields of training, fields that the tensors'
names tell, and fields that are read below."""
_CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")
"""Values of `init_lora_weights` with which training changes the base model's weights too."""


@dataclass(frozen=True, slots=True)
class AdaptedLinear:
    """The rank of a linear's addition B (A x), and its factor."""

    rank: int
    scale: float


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter that fits a model."""

    directory: Path
    linears: Mapping[str, AdaptedLinear]
    """The linears with an addition, by name."""
    digest: str
    """The digest of both files."""

    @property
    def rank(self) -> int:
        return max(linear.rank for linear in self.linears.values())

    @property
    def weights(self) -> Path:
        return self.directory / WEIGHTS_FILE

    @classmethod
    def read(cls, directory: Path, config: ModelConfig, max_rank: int) -> "AdapterFiles":
        """Raises InvalidRequest, with the file and the field, if the adapter is unreadable, is not
        for this model, has features that are not supported, weights that are no numbers, or a rank
        above `max_rank`."""
        try:
            config_text = read_small_file(directory / CONFIG_FILE, MAX_JSON_BYTES)
            fields = parse_json(Path(CONFIG_FILE), config_text)
            if not isinstance(fields, dict):
                raise StartupError(f"{CONFIG_FILE} is not a JSON object")
            header = read_header(directory / WEIGHTS_FILE)
        except OSError as error:
            raise _refused(directory, f"{error.filename}: {error.strerror}") from error
        except StartupError as error:
            raise _refused(directory, str(error)) from error
        _check_config(directory, fields)
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in header.items()}
        ranks = _ranks(directory, shapes, weight_shapes(config))
        linears = {name: _adapted(directory, fields, name, rank) for name, rank in ranks.items()}
        if (rank := max(ranks.values())) > max_rank:
            raise _refused(directory, f"rank {rank} is above max_lora_rank {max_rank}")
        # From here on the header has bounded the size of the file.
        try:
            with open_regular_file(directory / WEIGHTS_FILE) as weights:
                _check_values(directory, header, weights, linears)
                return cls(directory, linears, _digest(config_text, weights))
        except (OSError, ValueError) as error:  # the file has changed since
            raise _refused(directory, f"{WEIGHTS_FILE}: {error}") from error


def _refused(directory: Path, problem: str) -> InvalidRequest:
    return InvalidRequest(f"adapter {directory}: {problem}", "lora_path")


def _check_config(directory: Path, fields: Mapping[str, Any]) -> None:
    for name, supported in _PLAIN.items():
        if (value := fields.get(name, supported[0])) not in supported:
            raise _refused(directory, f"{name} {value!r} is not supported")
    for name in fields.keys() - _PLAIN.keys() - set(_IGNORED):
        if (value := fields[name]) is True or (value and isinstance(value, dict | list)):
            raise _refused(directory, f"{name} {value!r} is not supported")
    initial = fields.get("init_lora_weights", True)
    if isinstance(initial, str) and initial.lower().startswith(_CHANGES_BASE):
        raise _refused(directory, f"init_lora_weights {initial!r} changes the base model's weights")


def _adapted(directory: Path, fields: Mapping[str, Any], name: str, rank: int) -> AdaptedLinear:
    """Return the rank and the scale of the linear `name`, whose tensors have the rank `rank`."""
    wanted = _of_linear(directory, fields, name, "rank_pattern", "r")
    alpha = _of_linear(directory, fields, name, "alpha_pattern", "lora_alpha")
    if rank != wanted or not isinstance(alpha, int | float) or not abs(alpha) < 2**31:
        raise _refused(directory, f"{name} has rank {rank}; r is {wanted!r}, lora_alpha {alpha!r}")
    return AdaptedLinear(rank, alpha / (math.sqrt(rank) if fields.get("use_rslora") else rank))


def _of_linear(
    directory: Path, fields: Mapping[str, Any], name: str, pattern: str, default: str
) -> Any:
    """The value of the first key in the field `pattern` that is an end of the linear's name, as a
    regular expression; else the value of the field `default`."""
    values = fields.get(pattern) or {}
    try:
        if len(values) > _MAX_PATTERNS:
            raise _refused(directory, f"{pattern} has {len(values)} keys, at most {_MAX_PATTERNS}")
        for key, value in values.items():
            if _REPEATED_GROUP.search(key) or len(_REPEATS.findall(key)) > _MAX_REPEATS:
                raise _refused(directory, f"{pattern}: {key!r} could take for ever to match")
            if re.match(rf"(.*\.)?({key})$", name):
                return value
    except (AttributeError, TypeError, re.error) as error:
        raise _refused(directory, f"{pattern} {values!r}: {error}") from error
    return fields.get(default)


def _ranks(
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


def _check_values(
    directory: Path,
    header: Mapping[str, StoredTensor],
    weights: BinaryIO,
    linears: Mapping[str, AdaptedLinear],
) -> None:
    """Weights that are no numbers, or near the largest, make the logits of every request NaN."""
    first = weights.seek(0, os.SEEK_END) - max(tensor.end for tensor in header.values())
    for linear, adapted in linears.items():
        sides = []
        for side in "AB":
            name = f"base_model.model.{linear}.lora_{side}.weight"
            sides.append(magnitudes := _magnitudes(weights, header[name], first))
            if num_wrong := int((~np.isfinite(magnitudes)).sum()):
                raise _refused(directory, f"{name} has {num_wrong} values that are NaN or infinite")
        a, b = sides
        inner, scaled = a.sum(axis=1), abs(adapted.scale) * b
        growth = max(inner.max(), scaled.max(), (scaled @ inner).max())
        if growth > _MAX_GROWTH:
            raise _refused(
                directory,
                f"{linear}: its weights make inputs of 1 as large as {growth:.1e}, beyond "
                f"{_MAX_GROWTH:.1e}; requests would overflow",
            )


def _magnitudes(weights: BinaryIO, tensor: StoredTensor, first: int) -> Any:
    """The absolute values of a tensor as fp64. The tensors begin at `first` in the file."""
    weights.seek(first + tensor.begin)
    values = np.frombuffer(weights.read(tensor.end - tensor.begin), _FLOATS[tensor.dtype])
    if tensor.dtype == "BF16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return np.abs(values.astype(np.float64)).reshape(tensor.shape)


def _digest(config: bytes, weights: BinaryIO) -> str:
    import xxhash  # a check of a GPU imports this module, and has no xxhash

    digest = xxhash.xxh3_128(len(config).to_bytes(8, "little") + config)
    weights.seek(0)
    while piece := weights.read(_PIECE_BYTES):
        digest.update(piece)
    return digest.hexdigest()
