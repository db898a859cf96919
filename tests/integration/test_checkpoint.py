"""A checkpoint's faults are reported before any process of a run starts."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.make_checkpoint import make_checkpoint
from kvops.reference import ReferenceKernels
from quire.supervisor.model_source import check_model, find_model
from quire.supervisor.run_directory import free_port
from services.model.checkpoint.check import check
from services.runtime.config import load_settings
from services.runtime.errors import StartupError
from services.worker.config import PrefillSettings
from services.worker.loading import load

FIRST = "model-00001-of-00003.safetensors"

Corrupt = Callable[[Path], object]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "tiny", shards=3)


def edit_json(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_config(**fields: object) -> Corrupt:
    return lambda directory: edit_json(directory / "config.json", **fields)


def remove(*names: str) -> Corrupt:
    def edit(directory: Path) -> None:
        for name in names:
            (directory / name).unlink()

    return edit


def rename(name: str, new: str) -> Corrupt:
    return lambda directory: (directory / name).rename(directory / new)


def write(name: str, text: str) -> Corrupt:
    return lambda directory: (directory / name).write_text(text)


def cut(name: str, num_bytes: int) -> Corrupt:
    return lambda directory: os.truncate(directory / name, num_bytes)


def only_gguf(directory: Path) -> None:
    for path in directory.iterdir():
        path.unlink()
    (directory / "tiny-Q4_K_M.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")


def only_bin(directory: Path) -> None:
    remove(*(path.name for path in directory.glob("model*")))(directory)
    (directory / "pytorch_model.bin").touch()


@pytest.mark.parametrize("shards", [1, 3])
def test_a_good_checkpoint_is_accepted(tmp_path: Path, shards: int) -> None:
    check_model(make_checkpoint(tmp_path, shards=shards))


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (remove("config.json"), "DIR/config.json: No such file or directory"),
        (write("config.json", "{"), "DIR/config.json: not JSON: "),
        (edit_config(architectures=["GPT2LMHeadModel"]), "'GPT2LMHeadModel' is not supported"),
        (edit_config(hidden_size=65), "shape [384, 64], but the config makes it [384, 65]"),
        (
            edit_config(quantization_config={"quant_method": "bitsandbytes"}),
            "quantized by 'bitsandbytes'; Quire reads gptq, awq, ",
        ),
        (remove("tokenizer.json"), "no tokenizer: DIR/tokenizer.json does not exist"),
        (rename("tokenizer.json", "tokenizer.model"), "; tokenizer.model is not read, but "),
        (write("tokenizer.json", "{}"), "cannot read DIR/tokenizer.json: "),
        (write("chat_template.jinja", "{% if %}"), "the chat template is not valid: "),
        (cut(FIRST, 1000), f"DIR/{FIRST}: not a readable safetensors file: 1000 bytes, "),
        (
            only_gguf,
            "DIR/tiny-Q4_K_M.gguf: not a readable GGUF file: the file ends within its header",
        ),
        (only_bin, "DIR: pytorch_model.bin is in PyTorch's own format; "),
    ],
)
def test_a_broken_checkpoint_is_named(checkpoint: Path, corrupt: Corrupt, message: str) -> None:
    """`test_models_weights.py` has the other faults of weights."""
    corrupt(checkpoint)
    with pytest.raises(StartupError) as error:
        check(checkpoint)
    assert message in str(error.value).replace(str(checkpoint), "DIR")


def test_the_check_imports_no_pytorch(checkpoint: Path) -> None:
    """So it takes only a fraction of a second at the start."""
    code = (
        "import runpy, sys; sys.argv = ['check', sys.argv[1]];"
        "runpy.run_module('services.model.checkpoint', run_name='__main__');"
        "assert not {'torch', 'numpy', 'safetensors'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code, str(checkpoint)], check=True)


def test_a_run_of_a_bad_checkpoint_ends_before_any_service_starts(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    command = [sys.executable, "-m", "quire.cli", "serve", "--model", str(checkpoint)]
    # Paths of sockets are short.
    run_root = Path("/dev/shm") / f"quire-test-{os.getpid()}-bad"
    command += ["--run-root", str(run_root), "--http-port", "0"]
    command += ["--grpc-port", str(free_port("127.0.0.1"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    missing = checkpoint / "tokenizer.json"
    assert done.stderr == f"quire: no tokenizer: {missing} does not exist\n"
    assert not run_root.exists()


def test_the_demo_model_needs_no_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    check_model(find_model("demo").directory)


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [(remove("tokenizer.json"), "no tokenizer: "), (only_gguf, "not a readable GGUF file")],
)
def test_a_worker_refuses_by_itself_what_cannot_be_served(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, corrupt: Corrupt, message: str
) -> None:
    """In containers no supervisor checks it, and the gateway would never use the worker."""
    corrupt(checkpoint)
    monkeypatch.setenv("QUIRE_PREFILL_MODEL", str(checkpoint))
    settings = load_settings(PrefillSettings)
    with pytest.raises(StartupError, match=message):
        load(settings, lambda: None)


def test_kv_in_int8_is_a_pool_of_its_own(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has another fingerprint, and 20 bytes instead of 64 for a head of 16 values."""
    monkeypatch.setenv("QUIRE_PREFILL_MODEL", str(checkpoint))
    plain = load(load_settings(PrefillSettings), lambda: None)
    monkeypatch.setenv("QUIRE_PREFILL_KV_DTYPE", "int8")
    small = load(load_settings(PrefillSettings), lambda: None)
    assert small.layout.fingerprint != plain.layout.fingerprint
    assert small.layout.block_bytes * 64 == plain.layout.block_bytes * 20
    assert (plain.engine["kv_dtype"], small.engine["kv_dtype"]) == ("float32", "int8")


def test_a_backend_without_int8_kv_is_refused(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReferenceKernels, "kv_dtypes", ())
    monkeypatch.setenv("QUIRE_PREFILL_MODEL", str(checkpoint))
    monkeypatch.setenv("QUIRE_PREFILL_BACKEND", "reference")
    monkeypatch.setenv("QUIRE_PREFILL_KV_DTYPE", "int8")
    with pytest.raises(StartupError, match="backend 'reference' has no KV in int8; 'cpu' has"):
        load(load_settings(PrefillSettings), lambda: None)


def test_kv_in_fp8_is_a_pool_of_backends_that_have_it(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head of 16 values has 16 bytes. No kernel of a CPU reads them."""
    monkeypatch.setenv("QUIRE_PREFILL_MODEL", str(checkpoint))
    monkeypatch.setenv("QUIRE_PREFILL_KV_DTYPE", "fp8")
    with pytest.raises(StartupError, match="'cpu' has no KV in fp8; 'triton' has, and on GPUs"):
        load(load_settings(PrefillSettings), lambda: None)
    monkeypatch.setenv("QUIRE_PREFILL_BACKEND", "reference")
    small = load(load_settings(PrefillSettings), lambda: None)
    monkeypatch.setenv("QUIRE_PREFILL_KV_DTYPE", "auto")
    plain = load(load_settings(PrefillSettings), lambda: None)
    assert small.layout.fingerprint != plain.layout.fingerprint
    assert small.layout.block_bytes * 4 == plain.layout.block_bytes
    assert small.engine["kv_dtype"] == "fp8"
