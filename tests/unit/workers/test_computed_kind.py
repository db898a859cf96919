"""How linears compute, by what the checkpoint stores and by the settings; and the model `demo`."""

from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from bench.gpu.model import make_config
from quire.choices import Quantize
from services.model.config.quantization import StoredQuantization
from services.runtime.errors import StartupError
from services.worker.computed_kind import computed_kind, is_dequantized
from services.worker.config import PrefillSettings

GPTQ = StoredQuantization("gptq", "int4-128", 128)
FP8 = StoredQuantization("fp8", "fp8")
MXFP4 = StoredQuantization("mxfp4", "mxfp4")


@pytest.mark.parametrize(
    ("stored", "dtype", "quantize", "kind"),
    [
        (None, "auto", "auto", None),
        (None, "auto", "none", None),
        (None, "auto", "int4", "int4"),
        (FP8, "auto", "auto", None),
        (FP8, "auto", "int8", "int8"),
        (MXFP4, "auto", "auto", None),
        (MXFP4, "auto", "int4", "int4"),
        (GPTQ, "auto", "auto", "int4-128"),
        (GPTQ, "bfloat16", "auto", "int4-128"),
        # Dequantized, because the user says so, or because no quantized kernel computes in float32.
        (GPTQ, "auto", "none", None),
        (GPTQ, "float32", "auto", None),
    ],
)
def test_stored_weights_keep_their_kind_unless_they_are_dequantized(
    stored: StoredQuantization | None, dtype: str, quantize: Quantize, kind: str | None
) -> None:
    assert computed_kind(stored, dtype, quantize, "cpu") == kind
    assert is_dequantized(stored, dtype, quantize, "cpu") == (stored is not None and kind is None)


@pytest.mark.parametrize(
    ("dtype", "quantize", "kind"),
    [
        ("auto", "auto", "fp8"),
        ("auto", "int8", "int8"),
        ("auto", "none", None),
        ("float32", "auto", None),
    ],
)
def test_gpus_compute_fp8_and_mxfp4(dtype: str, quantize: Quantize, kind: str | None) -> None:
    for stored, own in ((FP8, "fp8"), (MXFP4, "mxfp4")):
        wanted = own if kind == "fp8" else kind
        assert computed_kind(stored, dtype, quantize, "triton") == wanted
        assert is_dequantized(stored, dtype, quantize, "triton") == (kind is None)


@pytest.mark.parametrize(("device", "kind"), [("cpu", None), ("cuda:0", "int4-128")])
def test_several_ranks_keep_the_kind_on_gpus_alone(device: str, kind: str | None) -> None:
    fields = {"model": "/model", "device": device, "tensor_parallel_size": 2}
    settings = PrefillSettings.model_validate(fields)
    config = replace(make_config(1, 256, 387), quantization=GPTQ)
    settings.check_ranks(config)
    assert settings.computed_kind(config) == kind
    assert settings.is_dequantized(config) == (kind is None)
    settings = PrefillSettings.model_validate({**fields, "quantize": "int8"})
    if device == "cpu":
        with pytest.raises(StartupError, match="size 2: --quantize int8 with several ranks needs"):
            settings.check_ranks(config)
    else:
        settings.check_ranks(config)


def test_a_worker_finds_the_demo_model_by_its_word(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As containers name it: with the words for defaults in the place of the other settings."""
    for name, value in (("MODEL", "demo"), ("MODEL_NAME", ""), ("QUANTIZE", "auto")):
        monkeypatch.setenv(f"QUIRE_PREFILL_{name}", value)
    settings = PrefillSettings.model_validate({})
    assert (settings.model, settings.served_name) == (smollm2, "SmolLM2-135M-Instruct")
    assert settings.quantize == "auto"


def test_what_is_set_for_the_demo_model_has_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MODEL", "demo"), ("MODEL_NAME", "small"), ("QUANTIZE", "int8")):
        monkeypatch.setenv(f"QUIRE_PREFILL_{name}", value)
    settings = PrefillSettings.model_validate({})
    assert (settings.served_name, settings.quantize) == ("small", "int8")


def test_quantized_kernels_in_float32_are_refused_before_anything_loads() -> None:
    with pytest.raises(ValidationError, match="int8 computes in bfloat16, and dtype is float32"):
        PrefillSettings.model_validate({"model": "/model", "dtype": "float32", "quantize": "int8"})


def test_none_in_the_environment_dequantizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_PREFILL_MODEL", "/model")
    monkeypatch.setenv("QUIRE_PREFILL_QUANTIZE", "none")
    assert PrefillSettings.model_validate({}).quantize == "none"
