"""`quantization_config`: the accepted fields, and the refusals by method and field."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.model.config.json_fields import JsonFields
from services.model.config.quantization import StoredQuantization, stored_quantization
from services.runtime.errors import StartupError

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "GEMM", "zero_point": True}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
TOKEN = INT8 | {"strategy": "token", "dynamic": True}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}


def compressed(form: str, weights: Any, inputs: Any = None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    config = {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"]}
    return config | {"config_groups": {"group_0": group}} | more


def read(config: dict[str, Any]) -> StoredQuantization | None:
    values = json.loads(json.dumps({"quantization_config": config}))
    return stored_quantization(JsonFields(Path("config.json"), values))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GPTQ, StoredQuantization("gptq", "int4-128", 128, zero_offset=1)),
        (
            GPTQ | {"checkpoint_format": "gptq_v2", "sym": False},
            StoredQuantization("gptq", "int4-128", 128),
        ),
        (AWQ, StoredQuantization("awq", "int4-64", 64)),
        (FP8, StoredQuantization("fp8", "fp8-128", block=True)),
        ({"quant_method": "fp8"}, StoredQuantization("fp8", "fp8")),
        (compressed("pack-quantized", INT4), StoredQuantization("pack-quantized", "int4-32", 32)),
        (
            compressed("int-quantized", INT8, TOKEN),
            StoredQuantization("int-quantized", "int8", symmetric=True),
        ),
        (
            compressed("float-quantized", FLOAT8, TOKEN),
            StoredQuantization("fp8", "fp8", symmetric=True),
        ),
        (
            compressed(
                "float-quantized", FLOAT8 | {"strategy": "block", "block_structure": [128, 128]}
            ),
            StoredQuantization("fp8", "fp8-128", symmetric=True, block=True),
        ),
    ],
)
def test_supported_methods(config: dict[str, Any], expected: StoredQuantization) -> None:
    assert read(config) == expected


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (GPTQ | {"bits": 8}, "bits: 8"),
        (GPTQ | {"group_size": -1}, "group_size: -1 is not 32, 64 or 128; -1 is one scale for all"),
        (GPTQ | {"group_size": 16}, "group_size: 16"),
        (GPTQ | {"desc_act": True}, "desc_act: True is not supported, only False"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format: 'marlin'"),
        (GPTQ | {"dynamic": {"-:.*": {}}}, "dynamic: "),
        (AWQ | {"version": "gemv"}, "version: 'gemv'"),
        (AWQ | {"zero_point": False}, "zero_point: False"),
        (AWQ | {"bits": True}, "bits: True"),
        (FP8 | {"weight_block_size": [64, 64]}, "weight_block_size: [64, 64]"),
        (FP8 | {"scale_fmt": "ue8m0"}, "scale_fmt: 'ue8m0'"),
        (compressed("nvfp4-pack-quantized", INT4), "format: 'nvfp4-pack-quantized'"),
        (
            compressed("pack-quantized", INT4 | {"num_bits": 8}),
            "config_groups.group_0.weights.num_bits: 8",
        ),
        (
            compressed("pack-quantized", INT4 | {"actorder": "group"}),
            "config_groups.group_0.weights.actorder",
        ),
        (compressed("pack-quantized", INT4, TOKEN), "config_groups.group_0.input_activations"),
        (
            compressed("int-quantized", INT8, TOKEN | {"dynamic": False}),
            "config_groups.group_0.input_activations.dynamic: False",
        ),
        (
            compressed("int-quantized", INT8 | {"strategy": "tensor"}, TOKEN),
            "config_groups.group_0.weights.strategy: 'tensor'",
        ),
        (
            compressed("int-quantized", INT8),
            "config_groups.group_0.input_activations.num_bits: None",
        ),
        (compressed("int-quantized", INT8, TOKEN, config_groups={}), "config_groups: 0 groups"),
        (
            compressed("int-quantized", INT8, TOKEN, sparsity_config={"format": "sparse-24"}),
            "sparsity_config: 'sparse-24'",
        ),
        (
            compressed("int-quantized", INT8, TOKEN, kv_cache_scheme={"num_bits": 8}),
            "kv_cache_scheme: not supported",
        ),
    ],
)
def test_the_refusal_names_method_and_field(config: dict[str, Any], field: str) -> None:
    with pytest.raises(StartupError) as refused:
        read(config)
    text = str(refused.value)
    assert text.startswith(f"config.json: quantization_config.{field}")
    assert text.endswith(f"(the checkpoint is quantized by {config['quant_method']!r})")


@pytest.mark.parametrize("method", ["bitsandbytes", "hqq", "quark", "nvfp4", "torchao"])
def test_other_methods_are_refused_by_name(method: str) -> None:
    with pytest.raises(StartupError, match=f"quantized by '{method}'; Quire reads gptq, awq, "):
        read({"quant_method": method})


def test_a_config_without_method_is_refused() -> None:
    with pytest.raises(StartupError, match="quantization_config: no quant_method; Quire reads"):
        read({"bits": 4})
