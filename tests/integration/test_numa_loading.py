"""A worker's model and pool on a host with two NUMA nodes, by the kernel's calls."""

import os
from pathlib import Path

import pytest

from bench.make_checkpoint import SHAPES, make_checkpoint
from services.runtime.numa.policy import InterleavePolicy
from services.runtime.numa.topology import HostCpus, Node
from services.worker.config import DecodeSettings
from services.worker.cpu.board import CpuBoard, CpuBoardEntry
from services.worker.cpu.place import Place
from services.worker.loading import LoadedModel, load

HOST = HostCpus((Node(0, (0,)), Node(1, (1,))), ((0,), (1,)))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", SHAPES["tiny"])


class Kernel:
    """Records at each call how many packed files there are."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self.num_files: list[int] = []

    def __call__(self, number: int, *arguments: object) -> int:
        self.num_files.append(len(packed_files(self._cache)))
        return 0


def packed_files(cache: Path) -> list[str]:
    found = (path for path in cache.rglob("tiny-*") if path.suffix != ".lock")
    return sorted(os.path.relpath(path.parent, cache) for path in found)


def loaded(checkpoint: Path, tmp_path: Path, nodes: tuple[int, ...], kernel: Kernel) -> LoadedModel:
    cache = tmp_path / "cache"
    settings = DecodeSettings.model_validate(
        {"model": checkpoint, "pool_root": tmp_path, "weights_cache": cache, "isa": "portable"}
    )
    place = Place(
        HOST,
        CpuBoard(tmp_path / "board"),
        CpuBoardEntry("decode-1", "decode", 0, nodes),
        InterleavePolicy(nodes, kernel),
        InterleavePolicy((0, 1), kernel),
    )
    return load(settings, lambda: None, place)


def test_each_node_has_packed_weights_of_its_own(checkpoint: Path, tmp_path: Path) -> None:
    kernel = Kernel(tmp_path / "cache")
    models = [loaded(checkpoint, tmp_path, (node,), kernel) for node in (0, 1)]
    assert packed_files(tmp_path / "cache") == ["node0", "node1"]
    assert models[0].layout == models[1].layout  # one pool: the same fingerprint
    assert kernel.num_files == []  # first touch by threads of the node
    arena = models[0].plan.arena
    assert arena is not None
    assert arena.node_ids == (0, 1)


def test_weights_of_several_nodes_are_written_while_pages_are_interleaved(
    checkpoint: Path, tmp_path: Path
) -> None:
    kernel = Kernel(tmp_path / "cache")
    loaded(checkpoint, tmp_path, (0, 1), kernel)
    assert packed_files(tmp_path / "cache") == ["."]
    assert kernel.num_files == [0, 1]  # before the load and after it
