"""Settings of a worker that its checkpoint cannot have are found before anything is loaded."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.runtime.errors import StartupError
from services.worker.preflight import check_cache, check_pool, check_quantize


def settings(**changes: object) -> Any:
    fields = {"quantize": None, "kernels": "cpu", "kv_dtype": "auto", "dtype": "auto"}
    return SimpleNamespace(**{**fields, "block_size": 16, "pool_bytes": None, **changes})


def config(kind: str | None = None) -> Any:
    """SmolLM2-135M's shape; `kind`: of the quantized linears that it stores."""
    stored = SimpleNamespace(kind=kind) if kind else None
    return SimpleNamespace(num_layers=30, num_kv_heads=3, head_dim=64, quantization=stored)


@pytest.mark.parametrize(
    ("quantize", "stored"),
    [(None, "int4-32"), ("int8", None), ("int8", "int8"), ("int4", "int4-64")],
)
def test_quantization_that_the_checkpoint_can_have_is_accepted(
    quantize: str | None, stored: str | None
) -> None:
    check_quantize(settings(quantize=quantize), config(stored))


def test_checkpoint_is_not_quantized_again_to_another_kind() -> None:
    with pytest.raises(StartupError, match=r"already quantized \(int4-32\); .* again, to int8"):
        check_quantize(settings(quantize="int8"), config("int4-32"))


@pytest.mark.parametrize(
    ("changes", "fewest_bytes"),
    [({}, 4 * 368_640), ({"kv_dtype": "int8"}, 4 * 195_840), ({"dtype": "float32"}, 4 * 737_280)],
)
def test_pool_needs_room_for_four_blocks(changes: dict[str, str], fewest_bytes: int) -> None:
    check_pool(settings(pool_bytes=fewest_bytes, **changes), config())
    with pytest.raises(StartupError, match="is too small: the KV pool needs at least 4 blocks of"):
        check_pool(settings(pool_bytes=fewest_bytes - 1, **changes), config())


def check_cached(directory: Path, **changes: Any) -> None:
    fields = {"tensor_parallel_size": 1, "secret": "s" * 16, "secret_file": None}
    fields |= {"num_expected_workers": 2, "cache_budget": 8 * 368_640, **changes}
    check_cache(settings(cache_directory=directory, **fields), config())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tensor_parallel_size": 2}, "only workers of one rank"),
        ({"secret": None}, "the next run would not find any"),
        ({"cache_budget": 8 * 368_640 - 1}, "too small: at least 2.81 MiB"),
    ],
)
def test_cache_that_could_not_work_is_refused(
    tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    with pytest.raises(StartupError, match=reason):
        check_cached(tmp_path / "cache", **changes)


def test_cache_directory_is_for_this_user_alone(tmp_path: Path) -> None:
    """Others could read prompts there, or write KV that a pool believes."""
    check_cached(tmp_path / "made" / "here")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(StartupError, match=r"open to others \(mode 0755\)"):
        check_cached(tmp_path / "open")
