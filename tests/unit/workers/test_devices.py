"""The setting `device`: which device each rank of a worker has."""

from collections.abc import Callable
from pathlib import Path

import pytest

from services.runtime.config import load_settings
from services.runtime.errors import StartupError
from services.worker.config import DecodeSettings

Settings = Callable[[str, int], DecodeSettings]


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Settings:
    def settings(device: str, size: int) -> DecodeSettings:
        values = {"MODEL": "/m", "DEVICE": device, "TENSOR_PARALLEL_SIZE": str(size)}
        for name, value in values.items():
            monkeypatch.setenv(f"QUIRE_DECODE_{name}", value)
        return load_settings(DecodeSettings)

    return settings


@pytest.mark.parametrize(
    ("device", "size", "devices"),
    [
        ("cpu", 1, ["cpu"]),
        ("cpu", 2, ["cpu", "cpu"]),
        ("cuda:3", 1, ["cuda:3"]),
        ("cuda:2", 4, ["cuda:2", "cuda:3", "cuda:4", "cuda:5"]),
        ("cuda:3,cuda:0", 2, ["cuda:3", "cuda:0"]),
        ("memfd:0", 2, ["memfd:0", "memfd:1"]),
    ],
)
def test_ranks_have_the_named_gpus_or_those_from_the_first_on(
    settings: Settings, device: str, size: int, devices: list[str]
) -> None:
    assert list(settings(device, size).devices) == devices


@pytest.mark.parametrize(("device", "size"), [("cuda:0,cuda:1", 1), ("cuda:0,cuda:1", 4)])
def test_a_wrong_number_of_gpus_is_refused(settings: Settings, device: str, size: int) -> None:
    with pytest.raises(StartupError, match=f"names 2 GPUs, and tensor_parallel_size is {size}"):
        settings(device, size).check_devices()


@pytest.mark.parametrize(
    "device", ["cuda", "cuda:0,", "cuda:0,cuda:0", "cuda:0,memfd:1", "cpu,cuda:0", "", "tpu:0"]
)
def test_an_invalid_device_is_refused(settings: Settings, device: str) -> None:
    with pytest.raises(StartupError, match="QUIRE_DECODE_DEVICE"):
        settings(device, 2)


@pytest.mark.parametrize(
    ("device", "size", "deterministic", "in_order"),
    [
        ("cuda:0", 2, "false", False),
        ("cuda:0", 2, "true", True),
        ("cuda:0", 1, "false", True),
        ("cpu", 2, "false", True),
        ("memfd:0", 2, "false", True),
    ],
)
def test_only_gpus_add_up_in_another_order_than_the_ranks(
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    size: int,
    deterministic: str,
    in_order: bool,
) -> None:
    """Law 10: on a CPU the setting changes nothing."""
    monkeypatch.setenv("QUIRE_DECODE_DETERMINISTIC", deterministic)
    assert settings(device, size).sums_in_order == in_order


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("KV_DTYPE", "fp8", "backend 'cpu' has no KV in fp8"),
        ("DEVICE", "cuda:99", "device cuda:99: "),
        ("BACKEND", "triton", "triton"),
        ("ATTENTION", "flashinfer", "attention 'flashinfer' is for the backend 'triton'"),
    ],
)
def test_a_check_finds_what_this_machine_cannot_compute(
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variable: str,
    value: str,
    message: str,
) -> None:
    """So that `quire serve` refuses it before any service starts."""
    monkeypatch.setenv("QUIRE_DECODE_POOL_ROOT", str(tmp_path))
    settings("cpu", 1)
    monkeypatch.setenv("QUIRE_DECODE_MODEL", "demo")
    load_settings(DecodeSettings).check()
    monkeypatch.setenv(f"QUIRE_DECODE_{variable}", value)
    with pytest.raises(StartupError, match=message):
        load_settings(DecodeSettings).check()
