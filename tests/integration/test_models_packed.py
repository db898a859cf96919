"""Packed weights of whole models: one file for all workers of a host, which depends on its
checkpoint."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kvops
from bench.make_checkpoint import make_checkpoint
from kvops.quantized import joined
from services.engine.batch import Row
from services.engine.models import fused, load_model
from services.engine.models.fused import FusedModel
from services.engine.weights.checkpoint import weights_digest
from services.engine.weights.fused_weights import COLUMNS
from services.engine.weights.packed_file import packed_file
from services.runtime.errors import StartupError

from .models_oracle import GREEDY, RecordingRunner

FILE = "model.safetensors"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "checkpoint")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def load(checkpoint: Path, cache: Path | None, quantized: bool = False) -> FusedModel:
    model = load_model(
        checkpoint,
        torch.float32,
        kvops.backend("cpu"),
        quantize="int8" if quantized else None,
        cache=cache,
    )
    assert isinstance(model, FusedModel)
    return model


def logits(checkpoint: Path, cache: Path | None) -> Tensor:
    recording = RecordingRunner(checkpoint, block_size=16, num_blocks=1, cache=cache)
    return recording.logits([Row([5, 6, 7], 0, [0], 0, (GREEDY,))])


def packed(cache: Path) -> list[Path]:
    return sorted(path for path in cache.iterdir() if path.suffix != ".lock")


def inode(cache: Path) -> int:
    (only,) = packed(cache)
    return only.stat().st_ino


def mappings(path: Path) -> list[dict[str, int]]:
    """The figures of each mapping of that file in this process, in KiB."""
    text = Path("/proc/self/smaps").read_text()
    parts = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", text, flags=re.MULTILINE)
    return [
        {name: int(size) for name, size in re.findall(r"^(\w+): +(\d+) kB$", part, re.MULTILINE)}
        for part in parts
        if part.partition("\n")[0].endswith(str(path))
    ]


def test_all_loads_map_one_file_and_copy_nothing_of_it(checkpoint: Path, cache: Path) -> None:
    """Also after steps with them. A page of which a process has its own copy would be an anonymous
    one."""
    models = [load(checkpoint, cache) for _ in range(2)]
    for model in models:
        model.logits(torch.ones(1, model.config.hidden_size))
    (file,) = packed(cache)
    maps = mappings(file)
    assert len(maps) == 2
    for figures in maps:
        assert figures["Size"] * 1024 == file.stat().st_size
        assert figures["Rss"] > 0
        assert figures["Anonymous"] == figures["Swap"] == 0


def test_every_kind_and_every_checkpoint_has_a_file(
    checkpoint: Path, cache: Path, tmp_path: Path
) -> None:
    other = make_checkpoint(tmp_path / "elsewhere" / "checkpoint", seed=1)
    load(checkpoint, cache)
    load(checkpoint, cache, quantized=True)
    load(other, cache)
    names = [path.name for path in packed(cache)]
    assert len(names) == len(set(names)) == 3
    assert all(re.fullmatch(r"checkpoint-(float32|int8)-[0-9a-f]{16}", name) for name in names)
    load(checkpoint, cache)
    assert [path.name for path in packed(cache)] == names


def other_weights(checkpoint: Path) -> None:
    """Another file with the same name, as the manual says, here of the same size."""
    new = make_checkpoint(checkpoint.with_name("new"), seed=1)
    (new / FILE).rename(checkpoint / FILE)


def other_weights_written_over(checkpoint: Path) -> None:
    """The inode and the size are the same: only the time differs."""
    new = make_checkpoint(checkpoint.with_name("new"), seed=1)
    (checkpoint / FILE).write_bytes((new / FILE).read_bytes())


def other_config(checkpoint: Path) -> None:
    config = checkpoint / "config.json"
    text = config.read_text()
    config.write_text(text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    assert config.read_text() != text


@pytest.mark.parametrize(
    "change",
    [other_weights, other_weights_written_over, other_config],
    ids=lambda change: change.__name__,
)
def test_a_checkpoint_that_changed_is_packed_again(
    checkpoint: Path, cache: Path, change: Callable[[Path], None]
) -> None:
    before = logits(checkpoint, cache)
    digest = load(checkpoint, cache).weights_digest
    first = inode(cache)
    change(checkpoint)
    after = logits(checkpoint, cache)
    assert inode(cache) != first
    assert not torch.equal(after, before)
    assert torch.equal(after, logits(checkpoint, None))
    model = load(checkpoint, cache)
    assert model.weights_digest == weights_digest(checkpoint)
    assert (model.weights_digest == digest) == (change is other_config)


def test_packings_have_files_of_their_own(
    checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(checkpoint, cache)
    before = inode(cache)
    monkeypatch.setattr(fused, "PACKING", "panels-of-another-version")
    load(checkpoint, cache)
    assert inode(cache) != before


def test_a_file_that_says_nothing_of_its_origin_is_packed_again(
    checkpoint: Path, cache: Path
) -> None:
    """The whole file, under the same name, since its version of the format recorded other facts."""
    expected = logits(checkpoint, cache)
    (file,) = packed(cache)
    file.unlink()
    zeros = torch.zeros(64, dtype=torch.uint8)
    packed_file(
        file,
        is_current=lambda facts: True,
        make=lambda: ({"age": 7}, {"head": 64}, lambda name: [zeros]),
        progress=lambda: None,
    )
    assert torch.equal(logits(checkpoint, cache), expected)


class Stop(Exception):
    pass


@pytest.mark.parametrize("num_steps", [0, 1, 5])
def test_packing_can_be_stopped_and_leaves_nothing_half_made(
    checkpoint: Path, cache: Path, num_steps: int
) -> None:
    """While it computes the checkpoint's digest, and between two linears."""
    steps = iter(range(num_steps))

    def progress() -> None:
        if next(steps, None) is None:
            raise Stop

    backend = kvops.backend("cpu")
    with pytest.raises(Stop):
        load_model(checkpoint, torch.float32, backend, cache=cache, progress=progress)
    assert packed(cache) == []
    assert next(steps, None) is None


def test_a_shape_that_the_kernels_do_not_know_is_refused_by_name(tmp_path: Path) -> None:
    """Three heads of 10 are not a multiple of 4."""
    checkpoint = make_checkpoint(tmp_path, num_heads=3, num_kv_heads=1, head_dim=10)
    with pytest.raises(StartupError, match=r"heads \* head size must be multiples of 4") as error:
        load(checkpoint, None)
    assert str(error.value).startswith(f"{checkpoint}: ")
    assert str(error.value).endswith("hidden_size is 64, with 3 heads of 10")


def test_gate_and_up_alternate_by_sixteen_outputs() -> None:
    """Of 20 outputs each: 16 and 16, then 4 and 4 followed by zeros."""
    gate, up = torch.arange(1, 21), torch.arange(101, 121)
    zeros = [0] * 12
    assert joined([gate, up], COLUMNS).tolist() == [
        *range(1, 17),
        *range(101, 117),
        *[17, 18, 19, 20, *zeros],
        *[117, 118, 119, 120, *zeros],
    ]
    columns = torch.arange(40).view(20, 2)
    assert torch.equal(joined([columns, columns], COLUMNS)[16:32], columns[:16])
