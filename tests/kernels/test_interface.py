"""The choice of a backend, and the arguments that every backend refuses."""

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from torch import zeros

import kvops
from kvops import Backend, BackendUnavailable
from kvops.native import NUMERICS, Lane, NativeCpu, usable_kernels
from tests.fake_gpu import use_gpu

ARENA = zeros(4, 2, 2, 16, 2, 8)
LAYER = ARENA[:, 0]
INDEX = torch.zeros(3, dtype=torch.int64)
INDEX_2D = torch.zeros(3, 2, dtype=torch.int64)
CU = torch.tensor([0, 1, 2, 3])
HEADS = zeros(3, 2, 8), zeros(3, 2, 8)


def test_the_reference_says_what_it_is() -> None:
    backend = kvops.backend("reference")
    numerics = {
        "backend": "reference",
        "dtype": "bfloat16",
        "isa": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }
    assert backend.name == "reference"
    assert backend.native is None
    assert backend.numerics(torch.bfloat16) == numerics
    assert backend.describe(torch.bfloat16) == numerics | {"threads": str(torch.get_num_threads())}


def test_the_native_backend_says_its_own_instruction_set_kernels_and_lanes() -> None:
    backend = kvops.backend("cpu")
    assert backend.native is not None
    backend.native.assign([Lane()] * 3)
    numerics = {
        "backend": "cpu",
        "dtype": "float32",
        "isa": usable_kernels()[0],
        "kernels": NUMERICS,
        "torch": torch.__version__,
    }
    assert backend.name == "cpu"
    assert backend.numerics(torch.float32) == numerics
    assert backend.describe(torch.float32) == numerics | {"threads": "3"}


def test_a_backend_computes_with_the_instruction_set_that_it_is_told() -> None:
    backend = kvops.backend("cpu", "portable")
    assert backend.numerics(torch.float32)["isa"] == "portable"
    with pytest.raises(kvops.BackendUnavailable, match="no kernels 'sse9' on this CPU; there are"):
        kvops.backend("cpu", "sse9")
    with pytest.raises(kvops.BackendUnavailable, match="'reference' has no instruction set"):
        kvops.backend("reference", "portable")


@pytest.mark.parametrize(
    ("lanes", "message"),
    [
        ([], "without threads"),
        ([Lane(owners=(0,))], "first lane cannot be lent"),
        ([Lane(), Lane(owners=(64,))], "an owner that is not on the board"),
        ([Lane(), Lane(owners=(-1,))], "an owner that is not on the board"),
        ([Lane(-2)], "no CPU -2"),
        ([Lane(100_000)], "no CPU 100000"),
    ],
    ids=str,
)
def test_lanes_that_cannot_be_are_refused(lanes: list[Lane], message: str) -> None:
    """The lanes from before stay."""
    cpu = NativeCpu(num_threads=2)
    with pytest.raises(ValueError, match=message):
        cpu.assign(lanes, torch.zeros(64, dtype=torch.int32))
    assert cpu.num_lanes == 2


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [("triton", "triton", "triton"), ("flashinfer", "flashinfer", "flashinfer-python")],
)
def test_a_backend_is_refused_without_its_package(
    monkeypatch: pytest.MonkeyPatch, name: str, module: str, package: str
) -> None:
    """A module that is already imported would hide that the package is missing."""
    for imported in [
        n for n in sys.modules if n.startswith(("kvops.triton", "kvops.attention.flash"))
    ]:
        monkeypatch.delitem(sys.modules, imported)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(BackendUnavailable, match=f"'{name}' needs the package {package},.*serve"):
        kvops.backend(name)


def test_a_package_that_cannot_be_loaded_is_named_with_its_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """For example flash-attn that was compiled for another PyTorch."""
    text = "raise ImportError('undefined symbol: _ZN3c10', name='flash_attn_2_cuda')"
    (tmp_path / "flash_attn.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "kvops.attention.flash_package", raising=False)
    with pytest.raises(BackendUnavailable, match=r"import flash_attn_2_cuda, .*undefined symbol"):
        kvops.backend("flash")


def test_triton_is_refused_without_a_gpu_that_can_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = "'triton' needs a CUDA device"
    use_gpu(monkeypatch, (8, 0), cuda=None)
    with pytest.raises(BackendUnavailable, match=rf"{wanted}; PyTorch .* is built without CUDA"):
        kvops.backend("triton")
    use_gpu(monkeypatch, (8, 0), is_available=False)
    with pytest.raises(BackendUnavailable, match=rf"{wanted}; PyTorch .* sees none"):
        kvops.backend("triton")
    use_gpu(monkeypatch, (7, 5), "Tesla T4")
    with pytest.raises(
        BackendUnavailable, match=rf"{wanted} of .* 8\.0 or more; Tesla T4 has 7\.5"
    ):
        kvops.backend("triton")
    use_gpu(monkeypatch, (8, 0))
    assert kvops.backend("triton").name == "triton"


def test_results_of_triton_name_what_they_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker with another GPU, PyTorch, Triton, CUDA or kernels cannot join the same pool."""
    use_gpu(monkeypatch, (9, 0), "NVIDIA H100")
    assert kvops.backend("triton").numerics(torch.bfloat16) == {
        "backend": "triton",
        "dtype": "bfloat16",
        "isa": "NVIDIA H100",
        "torch": torch.__version__,
        "triton": version("triton"),
        "cuda": "13.0",
        "kernels": "3",
    }


def test_kvops_works_where_the_native_kernels_were_not_compiled() -> None:
    """As on a GPU machine without a compiler: only the backend `cpu` is refused."""
    script = """
import sys
sys.modules["kvops._native"] = None
import kvops
assert kvops.backend("reference").name == "reference"
try:
    kvops.backend("cpu")
except kvops.BackendUnavailable as error:
    print(error)
"""
    text = subprocess.check_output([sys.executable, "-c", script], text=True)
    assert text == (
        "backend 'cpu' needs the C++ kernels, with which this installation was not compiled\n"
    )


def test_importing_kvops_imports_no_package_of_gpus() -> None:
    packages = {"triton", "flash_attn", "flashinfer"}
    loaded = f"import sys, kvops; print(sorted({packages} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", loaded], text=True) == "[]\n"


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BackendUnavailable, match="'fast'; there are reference, cpu, triton, flash"):
        kvops.backend("fast")


REFUSED: dict[str, Callable[[Backend], object]] = {
    "k: ": lambda ops: ops.store_kv(LAYER, zeros(3, 2, 9), zeros(3, 2, 9), INDEX),
    "k: bfloat16": lambda ops: ops.store_kv(
        LAYER, zeros(3, 2, 8).bfloat16(), zeros(3, 2, 8).bfloat16(), INDEX
    ),
    "v: ": lambda ops: ops.store_kv(LAYER, zeros(3, 2, 8), zeros(2, 2, 8), INDEX),
    "slot_mapping: ": lambda ops: ops.store_kv(LAYER, zeros(2, 2, 8), zeros(2, 2, 8), INDEX),
    "slot_mapping: float32": lambda ops: ops.store_kv(
        LAYER, zeros(3, 2, 8), zeros(3, 2, 8), INDEX.float()
    ),
    "kv_layer: ": lambda ops: ops.store_kv(ARENA, zeros(3, 2, 8), zeros(3, 2, 8), INDEX),
    "q: ": lambda ops: ops.paged_attention(
        zeros(3, 8), LAYER, INDEX_2D, CU, INDEX, 1.0, max_query_len=1
    ),
    "2 kv heads do not divide 3": lambda ops: ops.paged_attention(
        zeros(3, 3, 8), LAYER, INDEX_2D, CU, INDEX, 1.0, max_query_len=1
    ),
    "cu_query_lens: ": lambda ops: ops.paged_attention(
        zeros(3, 4, 8), LAYER, INDEX_2D, INDEX, INDEX, 1.0, max_query_len=1
    ),
    "block_tables: ": lambda ops: ops.paged_attention(
        zeros(3, 4, 8), LAYER, INDEX, CU, INDEX, 1.0, max_query_len=1
    ),
    "context_lens: ": lambda ops: ops.paged_attention(
        zeros(3, 4, 8), LAYER, INDEX_2D, CU, INDEX_2D, 1.0, max_query_len=1
    ),
    "scale: -1.0 is not positive": lambda ops: ops.paged_attention(
        zeros(3, 4, 8), LAYER, INDEX_2D, CU, INDEX, -1.0, max_query_len=1
    ),
    "window: 0 is not positive": lambda ops: ops.paged_attention(
        zeros(3, 4, 8), LAYER, INDEX_2D, CU, INDEX, 1.0, window=0, max_query_len=1
    ),
    "max_query_len: 3 rows of at most 1 tokens are fewer than 4": lambda ops: ops.paged_attention(
        zeros(4, 4, 8), LAYER, INDEX_2D, CU, INDEX, 1.0, max_query_len=1
    ),
    "kv: .* is not an arena": lambda ops: ops.clear_begun_blocks(LAYER, INDEX),
    "pairs: ": lambda ops: ops.copy_blocks(ARENA, INDEX),
    "kv: ": lambda ops: ops.copy_blocks(zeros(3), INDEX_2D),
    "source: ": lambda ops: ops.copy_blocks(ARENA, zeros(3, 2).long(), ARENA[:, :, :1]),
    "x: ": lambda ops: ops.linear(zeros(3, 5), zeros(4, 6)),
    "bias: ": lambda ops: ops.linear(zeros(3, 6), zeros(4, 6), zeros(6)),
    "weight: ": lambda ops: ops.rms_norm(zeros(3, 5), zeros(6), 1e-6),
    "residual: ": lambda ops: ops.add_rms_norm(zeros(3, 5), zeros(2, 5), zeros(5), 1e-6),
    "cos: ": lambda ops: ops.store_heads(
        LAYER, zeros(3, 4, 8), *HEADS, INDEX, None, (zeros(3, 8), zeros(3, 4))
    ),
    "sin: ": lambda ops: ops.store_heads(
        LAYER, zeros(3, 4, 8), *HEADS, INDEX, None, (zeros(3, 4), zeros(3, 4).bfloat16())
    ),
    "up: ": lambda ops: ops.silu_mul(zeros(3, 5), zeros(3, 6)),
}


@pytest.mark.parametrize(("message", "call"), REFUSED.items(), ids=REFUSED.keys())
def test_wrong_arguments_are_refused_by_name(
    ops: Backend, message: str, call: Callable[[Backend], object]
) -> None:
    with pytest.raises(ValueError, match=message):
        call(ops)
