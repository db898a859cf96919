"""A pool's directory appears whole or not at all, and its header reads back as it was written."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from blockstore.records import PoolSpec
from quire.worker_names import new_worker_id, role_of, worker_name
from services.pool.directory import (
    PoolDirectory,
    incomplete_pools,
    new_directory,
    pool_directories,
    remove_incomplete_pools,
)
from services.pool.header import BadHeader, PoolHeader
from services.pool.layout import PoolLayout
from services.pool.names import new_pool_id

LAYOUT = PoolLayout("Qwen/Qwen3-0.6B", "f00d", 28, 8, 128, "bfloat16", 16)
HEADER = PoolHeader("qwen-1", "run", LAYOUT, num_blocks=11, watermark_blocks=1)


def test_a_block_of_qwen3_is_1_8_megabytes() -> None:
    assert LAYOUT.block_bytes == 28 * 2 * 16 * 8 * 128 * 2 == 1_835_008
    assert replace(LAYOUT, dtype="float32").block_bytes == 2 * LAYOUT.block_bytes
    assert HEADER.arena_bytes == 11 * 1_835_008


def test_the_header_carries_the_stores_spec() -> None:
    assert HEADER.spec == PoolSpec(
        "qwen-1", "Qwen/Qwen3-0.6B", "f00d", 11, 16, 1_835_008, watermark_blocks=1
    )


def test_a_header_reads_back_and_is_private(tmp_path: Path) -> None:
    HEADER.write(tmp_path / "header.json")
    assert PoolHeader.read(tmp_path / "header.json") == HEADER
    assert (tmp_path / "header.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"pool_id": "x"}', "\x00"])
def test_an_invalid_header_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "header.json").write_text(text)
    with pytest.raises(BadHeader, match=re.escape("header.json")):
        PoolHeader.read(tmp_path / "header.json")


def test_a_pool_appears_when_it_is_complete(tmp_path: Path) -> None:
    with new_directory(tmp_path, "pool-1") as half:
        HEADER.write(half.header)
        assert pool_directories(tmp_path) == ()
    assert pool_directories(tmp_path) == (PoolDirectory(tmp_path / "pool-1"),)
    assert pool_directories(tmp_path)[0].read_header() == HEADER
    assert (tmp_path / "pool-1").stat().st_mode & 0o777 == 0o700


def test_a_pool_that_could_not_be_made_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no memory"), new_directory(tmp_path, "pool-1"):
        raise OSError("no memory")
    assert list(tmp_path.iterdir()) == []


def test_a_pool_disappears_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies while it deletes the files leaves a part of the pool, which is found and
    removed."""
    with new_directory(tmp_path, "pool-1"):
        pass
    pool = pool_directories(tmp_path)[0]
    monkeypatch.setattr(shutil, "rmtree", Mock(side_effect=OSError("killed")))
    with pytest.raises(OSError, match="killed"):
        pool.remove()
    monkeypatch.undo()
    assert pool_directories(tmp_path) == ()
    assert [path.name for path in incomplete_pools(tmp_path)] == [".half-pool-1"]
    remove_incomplete_pools(tmp_path)
    pool.remove()
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_a_dead_maker_are_removed_and_other_files_kept(tmp_path: Path) -> None:
    (tmp_path / ".half-pool-1" / "workers").mkdir(parents=True)
    (tmp_path / "notes").mkdir()
    (tmp_path / "host.lock").touch()
    assert pool_directories(tmp_path) == ()
    remove_incomplete_pools(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["host.lock", "notes"]


def test_no_root_means_no_pools(tmp_path: Path) -> None:
    assert pool_directories(tmp_path / "nowhere") == ()
    assert PoolDirectory(tmp_path / "nowhere").worker_ids() == ()


def test_names_are_safe_and_never_drawn_twice() -> None:
    assert re.fullmatch(r"qwen-qwen3-0\.6b-[0-9a-f]{8}", new_pool_id("Qwen/Qwen3-0.6B"))
    assert re.fullmatch(r"model-[0-9a-f]{8}", new_pool_id("/../{}"))
    assert re.fullmatch(r"x{48}-[0-9a-f]{8}", new_pool_id("x" * 300))


def test_id_of_a_worker_has_its_role_and_its_name() -> None:
    assert re.fullmatch(r"decode-[0-9a-f]{8}", new_worker_id("decode"))
    assert len({new_worker_id("decode") for _ in range(100)}) == 100
    numbered = new_worker_id("prefill", 12)
    assert re.fullmatch(r"prefill-12-[0-9a-f]{8}", numbered)
    assert (role_of(numbered), worker_name(numbered)) == ("prefill", "prefill-12")
    assert worker_name("decode-3fa85f64") == "decode-3fa85f64"
