"""Checkpoints in every form: one file or shards, every dtype, and every kind of damage."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import kvops
from bench.make_checkpoint import CheckpointSpec, make_checkpoint
from services.engine.batch import Row
from services.engine.fingerprint import fingerprint
from services.engine.models import Model, load_model
from services.engine.weights.checkpoint import load_weights, weights_digest
from services.model.checkpoint.reading import read_model_config
from services.runtime.errors import StartupError

from .models_oracle import GREEDY, RecordingRunner

OPS = kvops.backend("cpu")
FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Model:
    return load_model(directory, dtype, OPS)


def logits(directory: Path, dtype: torch.dtype = torch.float32, backend: str = "cpu") -> Tensor:
    recording = RecordingRunner(
        directory, block_size=16, num_blocks=1, backend=backend, dtype=dtype
    )
    return recording.logits([Row([5, 6, 7], 0, [0], 0, (GREEDY,))])


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "single")


def test_shards_hold_the_same_model_as_one_file(checkpoint: Path, tmp_path: Path) -> None:
    sharded = make_checkpoint(tmp_path / "sharded", shards=3)
    assert len(list(sharded.glob("*.safetensors"))) == 3
    assert torch.equal(logits(sharded), logits(checkpoint))


def read(directory: Path) -> Mapping[str, Tensor]:
    return load_weights(directory, read_model_config(directory)).tensors


def test_weights_are_views_of_the_file(checkpoint: Path) -> None:
    """All weights: the kernel maps the file, and nothing is copied."""
    weights = read(checkpoint)
    mapped = [
        range(*(int(address, 16) for address in line.split()[0].split("-")))
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(str(checkpoint / FILE))
    ]
    assert all(any(weight.data_ptr() in part for part in mapped) for weight in weights.values())


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_weights_are_read_as_they_are(tmp_path: Path, stored: str) -> None:
    checkpoint = make_checkpoint(tmp_path, dtype=stored)
    in_file = load_file(checkpoint / FILE)
    weights = read(checkpoint)
    assert weights.keys() == in_file.keys()
    assert {weight.dtype for weight in weights.values()} == {getattr(torch, stored)}
    assert all(torch.equal(weights[name], in_file[name]) for name in in_file)


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_float_files_load_as_all_float_types(
    tmp_path: Path, stored: str, dtype: torch.dtype
) -> None:
    """In fp32 no bit of the file is lost: the logits are those of the reference."""
    checkpoint = make_checkpoint(tmp_path, dtype=stored)
    assert load(checkpoint, dtype).dtype == dtype
    exact = logits(checkpoint, backend="reference")
    limit = 1e-5 if dtype == torch.float32 else 0.1 * float(exact.std())
    torch.testing.assert_close(logits(checkpoint, dtype), exact, rtol=0, atol=limit)


def test_a_head_beside_tied_embeddings_and_old_rope_buffers_are_passed_over(
    checkpoint: Path,
) -> None:
    before = logits(checkpoint)
    tensors = load_file(checkpoint / FILE)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(tensors, checkpoint / FILE)
    assert torch.equal(logits(checkpoint), before)


def test_a_head_that_differs_from_tied_embeddings_is_refused(checkpoint: Path) -> None:
    """transformers would use it, and other engines would not."""
    edit(checkpoint, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(384, 64)}))
    assert "lm_head.weight differs from model.embed_tokens.weight" in refused(checkpoint)


def refused(directory: Path) -> str:
    with pytest.raises(StartupError) as error:
        load(directory)
    return str(error.value)


def edit(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(directory / FILE)
    change(tensors)
    save_file(tensors, directory / FILE)


def test_a_missing_tensor_is_named(checkpoint: Path) -> None:
    edit(checkpoint, lambda tensors: tensors.pop("model.norm.weight"))
    assert refused(checkpoint) == f"{checkpoint}: missing tensors: model.norm.weight"


def test_many_missing_tensors_are_counted(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    text = refused(checkpoint)
    assert "missing tensors: model.layers.2.input_layernorm.weight, " in text
    assert text.endswith(" and 8 more")


def test_an_unknown_tensor_is_named(checkpoint: Path) -> None:
    edit(checkpoint, lambda tensors: tensors.update({"model.extra": torch.zeros(2)}))
    assert refused(checkpoint) == f"{checkpoint}/{FILE}: unknown tensors: model.extra"


def test_a_wrong_shape_is_named_with_both_shapes(checkpoint: Path) -> None:
    edit(checkpoint, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(65)}))
    assert refused(checkpoint) == (
        f"{checkpoint}/{FILE}: model.norm.weight: shape [65], but the config makes it [64]"
    )


def test_an_integer_tensor_is_named(checkpoint: Path) -> None:
    ones = torch.ones(64, dtype=torch.int64)
    edit(checkpoint, lambda tensors: tensors.update({"model.norm.weight": ones}))
    assert "model.norm.weight: I64 is not bf16, fp16 or fp32" in refused(checkpoint)


@pytest.mark.parametrize("size", [0, 4, 1000, -1])
def test_a_truncated_file_is_named(checkpoint: Path, size: int) -> None:
    content = (checkpoint / FILE).read_bytes()
    (checkpoint / FILE).write_bytes(content[:size])
    assert refused(checkpoint).startswith(f"{checkpoint}/{FILE}: not a readable safetensors file")


def test_a_file_of_garbage_is_named(checkpoint: Path) -> None:
    (checkpoint / FILE).write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{not json at all}")
    assert refused(checkpoint).startswith(f"{checkpoint}/{FILE}: not a readable safetensors file")


def test_no_weights_at_all(checkpoint: Path) -> None:
    (checkpoint / FILE).unlink()
    assert refused(checkpoint) == f"{checkpoint}: neither {FILE} nor {INDEX}"


@pytest.mark.parametrize(
    ("index", "named"),
    [
        ("{", "not JSON: "),
        ("[]", "not an index with a weight_map"),
        ('{"weight_map": []}', "not an index with a weight_map"),
        ('{"weight_map": {}}', "weight_map: empty"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "'gone.safetensors' is not a file beside it"),
        ('{"weight_map": {"a": "../single/x"}}', "'../single/x' is not a file beside it"),
    ],
)
def test_a_broken_index_is_named(checkpoint: Path, index: str, named: str) -> None:
    (checkpoint / FILE).rename(checkpoint / "other.safetensors")
    (checkpoint / INDEX).write_text(index)
    text = refused(checkpoint)
    assert text.startswith(f"{checkpoint}/{INDEX}: ")
    assert named in text


def test_a_tensor_in_two_shards_is_named(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, shards=2)
    first, second = sorted(checkpoint.glob("*.safetensors"))
    norm = {"model.norm.weight": load_file(first)["model.norm.weight"]}
    save_file(load_file(second) | norm, second)
    assert refused(checkpoint) == f"{second}: model.norm.weight: in another file too"


def test_a_fingerprint_is_of_what_the_kv_depends_on(tmp_path: Path) -> None:
    spec = CheckpointSpec()
    checkpoint = make_checkpoint(tmp_path / "a", spec)
    numerics = OPS.numerics(torch.float32)

    def of(
        directory: Path, dtype: torch.dtype = torch.float32, block_size: int = 16, **changed: str
    ) -> str:
        config = read_model_config(directory)
        digest = weights_digest(directory)
        return fingerprint(config, digest, dtype, block_size, numerics | changed)

    others = [
        of(make_checkpoint(tmp_path / "seed", replace(spec, seed=1))),
        of(make_checkpoint(tmp_path / "theta", replace(spec, rope_theta=500.0))),
        of(checkpoint, dtype=torch.bfloat16),
        of(checkpoint, block_size=32),
        of(checkpoint, isa="other"),
        of(checkpoint, kernels="other"),
        of(checkpoint, quantize="int8"),
        of(checkpoint, quantize="int4"),
    ]
    same = of(make_checkpoint(tmp_path / "b", spec))
    assert of(checkpoint) == same
    defaults = tmp_path / "b" / "generation_config.json"
    defaults.write_text(json.dumps({**json.loads(defaults.read_text()), "temperature": 0.5}))
    assert of(tmp_path / "b") == same
    assert len(same) == 32
    assert len({same, *others}) == 9
    with (checkpoint / FILE).open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))
    assert of(checkpoint) not in {same, *others}


def test_a_model_knows_the_digest_of_its_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    """For weights packed from the files, read from the cache, or composed."""
    digest = weights_digest(checkpoint)
    cached = [load_model(checkpoint, torch.float32, OPS, cache=tmp_path / "c") for _ in range(2)]
    composed = load_model(checkpoint, torch.float32, kvops.backend("reference"))
    assert {m.weights_digest for m in (load(checkpoint), *cached, composed)} == {digest}


def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"config\.json: No such file"):
        load(tmp_path)
    with pytest.raises(StartupError, match=r"neither model\.safetensors nor"):
        weights_digest(tmp_path)
