"""Files of a checkpoint that are made to harm the process that reads them."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.make_checkpoint import make_checkpoint
from quire.files import read_small_file
from quire.supervisor.errors import ServeError
from quire.supervisor.model_source import check_model
from services.model.checkpoint.adapter import CONFIG_FILE, WEIGHTS_FILE, AdapterFiles
from services.model.checkpoint.reading import read_model_config
from services.model.checkpoint.weights import read_header
from services.model.config.json_fields import MAX_JSON_BYTES, JsonFields
from services.model.text.tokenizer import Tokenizer
from services.runtime.errors import InvalidRequest, StartupError
from tests.adapters import make_adapter


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


def fifo(path: Path) -> None:
    os.mkfifo(path)


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 8 << 30)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (fifo, "not a regular file"),
        (zeros, "not a regular file"),
        (Path.mkdir, "Is a directory"),
        (sparse, r"larger than 1,000 bytes"),
    ],
)
def test_a_small_file_is_regular_and_small(
    tmp_path: Path, make: Callable[[Path], object], problem: str
) -> None:
    make(tmp_path / "file")
    with pytest.raises(OSError, match=problem):
        read_small_file(tmp_path / "file", 1000)
    with pytest.raises(StartupError, match=r"file: "):
        JsonFields.read(tmp_path / "file")
    (tmp_path / "good").write_bytes(b"x" * 1000)
    assert read_small_file(tmp_path / "good", 1000) == b"x" * 1000


def test_a_deep_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a":' * 10**5)
    with pytest.raises(StartupError, match=r"config\.json: not JSON: nested too deeply"):
        read_model_config(tmp_path)


def with_header(path: Path, length: int, header: bytes, num_bytes: int = 0) -> Path:
    path.write_bytes(length.to_bytes(8, "little") + header + bytes(num_bytes))
    return path


def test_the_length_of_a_header_is_bound(tmp_path: Path) -> None:
    """Before it is read: the file is sparse, and as large as its header says."""
    path = with_header(tmp_path / "model.safetensors", 8 << 30, b"{")
    os.truncate(path, (8 << 30) + 8)
    with pytest.raises(StartupError, match=r"its header has 8589934592 bytes, at most 16777216"):
        read_header(path)
    spaces = with_header(path, 90 << 20, b" " * (90 << 20))
    with pytest.raises(StartupError, match=r"its header has 94371840 bytes, at most 16777216"):
        read_header(spaces)


def entry(begin: int, end: int, shape: list[Any], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        ({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, "b begins at byte 4, not at 8"),
        ({"a": entry(0, 8, [2]), "b": entry(0, 12, [3])}, "b begins at byte 0, not at 8"),
        ({"a": entry(0, 4, [1]), "b": entry(8, 12, [1])}, "b begins at byte 8, not at 4"),
        ({"a": entry(0, 12, [2])}, "a has 12 bytes, and its shape needs 8"),
        ({"a": entry(0, 12, [1 << 40, 1 << 40])}, "a has 12 bytes, and its shape needs"),
        ({"a": entry(0, 8, [2])}, r"\d+ bytes, but its header requires \d+"),
        ({"a": entry(8, 4, [-1])}, r"shape \(-1,\) at bytes \(8, 4\)"),
        ({"a": entry(0, 12, [True])}, r"shape \(True,\) at bytes"),
        ({"a": entry(0, 12, [3]) | {"data_offsets": [12]}}, r"at bytes \(12,\)"),
    ],
)
def test_tensors_follow_one_another(tmp_path: Path, header: dict[str, Any], problem: str) -> None:
    text = json.dumps(header).encode()
    path = with_header(tmp_path / "model.safetensors", len(text), text, 12)
    with pytest.raises(StartupError, match=problem):
        read_header(path)


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
@pytest.mark.parametrize("make", [fifo, zeros])
def test_an_adapter_of_no_regular_files_is_refused_at_once(
    checkpoint: Path, tmp_path: Path, name: str, make: Callable[[Path], object]
) -> None:
    adapter = make_adapter(tmp_path / "adapter", checkpoint, 1)
    (adapter / name).unlink()
    make(adapter / name)
    with pytest.raises(InvalidRequest, match="not a regular file"):
        AdapterFiles.read(adapter, read_model_config(checkpoint), 64)


def test_a_large_config_of_an_adapter_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", checkpoint, 1)
    (adapter / CONFIG_FILE).write_text(" " * (MAX_JSON_BYTES + 1))
    with pytest.raises(InvalidRequest, match=f"larger than {MAX_JSON_BYTES:,} bytes"):
        AdapterFiles.read(adapter, read_model_config(checkpoint), 64)


@pytest.mark.parametrize("side", ["lora_A", "lora_B"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_adapter_that_overflows_is_refused_by_name(
    checkpoint: Path, tmp_path: Path, side: str, dtype: torch.dtype
) -> None:
    adapter = make_adapter(tmp_path / "adapter", checkpoint, 1)
    config = read_model_config(checkpoint)
    AdapterFiles.read(adapter, config, 64)
    weights = load_file(adapter / WEIGHTS_FILE)
    name = f"base_model.model.model.layers.1.mlp.up_proj.{side}.weight"
    weights[name][0, 0] = 3e38
    save_file({name: weight.to(dtype) for name, weight in weights.items()}, adapter / WEIGHTS_FILE)
    with pytest.raises(InvalidRequest, match=r"layers\.1\.mlp\.up_proj: .* would overflow"):
        AdapterFiles.read(adapter, config, 64)
    weights[name][0, 0] = float("inf")
    save_file(weights, adapter / WEIGHTS_FILE)
    with pytest.raises(InvalidRequest, match=rf"up_proj\.{side}\.weight has 1 values that are NaN"):
        AdapterFiles.read(adapter, config, 64)


def edit_tokenizer(directory: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    path = make_checkpoint(directory) / "tokenizer.json"
    fields = json.loads(path.read_text())
    edit(fields)
    path.write_text(json.dumps(fields))
    return directory


def added(text: str, token_id: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": text, "special": True, **flags}


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (
            lambda fields: fields["added_tokens"].extend(
                added(f"<{number}>", 384 + number) for number in range(70_000)
            ),
            r"tokenizer\.json: 7000\d added tokens, at most 65536",
        ),
        (
            lambda fields: fields["added_tokens"].append(added("<" * 2000, 384)),
            r"tokenizer\.json: an added token of 2000 characters, at most 1024",
        ),
        (
            lambda fields: fields["model"]["vocab"].update({"far": 4_000_000_000}),
            "a token id of 4000000000, at most 4194303",
        ),
        (
            lambda fields: fields.update(padding_text=" " * (64 << 20)),
            r"tokenizer\.json: larger than 67,108,864 bytes",
        ),
    ],
)
def test_a_tokenizer_of_too_much_is_refused_before_any_process_starts(
    tmp_path: Path, edit: Callable[[dict[str, Any]], object], problem: str
) -> None:
    with pytest.raises(ServeError, match=problem):
        check_model(edit_tokenizer(tmp_path / "model", edit))


def test_a_check_ends_at_its_limit_of_memory(tmp_path: Path) -> None:
    """The metadata of this file are a list of 2^30 numbers."""
    path = tmp_path / "model.gguf"
    name = b"general.numbers"
    header = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(name)) + name
    path.write_bytes(header + struct.pack("<IIQ", 9, 0, 1 << 30))
    os.truncate(path, (1 << 30) + (1 << 20))
    with pytest.raises(ServeError, match="to read the checkpoint's files takes more than 2 GiB"):
        check_model(path)


def test_parts_of_special_tokens_are_hidden_among_many_tokens(tmp_path: Path) -> None:
    texts = [f"<|reserved {number}|>" for number in range(5000)]
    directory = edit_tokenizer(
        tmp_path / "model",
        lambda fields: fields["added_tokens"].extend(
            added(text, 384 + number) for number, text in enumerate(texts)
        ),
    )
    special = Tokenizer.from_directory(directory).special
    given, hidden = special.hide(["Hi <|reserved 7", "served 4999|> there", texts[9], "plain"])
    assert sorted(hidden.values()) == ["<|reserved 7", texts[9], "served 4999|>"]
    assert given[3] == "plain"
