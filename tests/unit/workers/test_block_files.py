"""Blocks in files: what is read back is the block that was asked for, or nothing."""

import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from services.worker.file_cache.block_files import BadFile, BlockFiles, BlockName

from .kept_blocks import FINGERPRINT, kept

NAME = BlockName(b"h" * 16, b"p" * 16, (1, 2, 3, 4), 0)
KV = bytes(range(256)) * 4
FILE_BYTES = 32 + 16 + 16 + 4 * 4 + len(KV) + 16


def files(root: Path, budget: int = 1 << 20, fingerprint: str = FINGERPRINT) -> BlockFiles:
    return BlockFiles(root, fingerprint, "prefill-1", budget, num_writers=1)


def write(to: BlockFiles, name: BlockName = NAME) -> bool:
    return to.write(name, memoryview(KV), lambda: True)


def read(of: BlockFiles, name: BlockName = NAME) -> bytes | None:
    target = bytearray(len(KV))
    return bytes(target) if of.read(name, memoryview(target)) else None


def numbered(number: int, place: int = 0) -> BlockName:
    return replace(NAME, prefix_hash=number.to_bytes(16, "big"), number=place)


def test_block_comes_back_for_any_worker_of_the_host(tmp_path: Path) -> None:
    """Only the user may read it."""
    root = tmp_path / "made" / "here"
    assert write(files(root))
    (path,) = kept(root)
    assert path == root / FINGERPRINT / NAME.prefix_hash.hex()
    modes = [each.stat().st_mode & 0o777 for each in (root, path.parent, path)]
    assert modes == [0o700, 0o700, 0o600]
    assert read(files(root)) == KV
    assert [files(root).has(each) for each in (NAME.prefix_hash, b"i" * 16)] == [True, False]
    assert read(files(tmp_path)) is None


def flip(place: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


@pytest.mark.parametrize(
    "damage",
    [lambda _: b"", lambda content: content[:-1], flip(FILE_BYTES - 1), flip(80), flip(1000)],
    ids=["empty", "torn", "checksum", "first byte of KV", "another byte of KV"],
)
def test_damaged_file_is_found_and_removed(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    write(files(tmp_path))
    (path,) = kept(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(BadFile):
        read(files(tmp_path))
    assert kept(tmp_path) == []


@pytest.mark.parametrize(
    "asked", [{"token_ids": (1, 2, 3, 5)}, {"parent": b"q" * 16}, {"prefix_hash": b"i" * 16}]
)
def test_file_of_another_block_is_not_believed(tmp_path: Path, asked: dict[str, object]) -> None:
    """The checksum is right, and the file's name is the one that is asked for."""
    write(files(tmp_path))
    name = replace(NAME, **asked)  # type: ignore[arg-type]
    (path,) = kept(tmp_path)
    path.rename(path.with_name(name.prefix_hash.hex()))
    with pytest.raises(BadFile, match="name"):
        read(files(tmp_path), name)


def test_file_of_another_fingerprint_is_not_believed(tmp_path: Path) -> None:
    write(files(tmp_path))
    other = files(tmp_path, fingerprint="e" * 32)
    assert not other.has(NAME.prefix_hash)
    (tmp_path / FINGERPRINT).rename(tmp_path / ("e" * 32))
    with pytest.raises(BadFile, match="name"):
        read(other)


def test_block_that_changed_while_it_was_written_has_no_file(tmp_path: Path) -> None:
    assert not files(tmp_path).write(NAME, memoryview(KV), lambda: False)
    assert list(tmp_path.glob("*/*")) == []


def test_budget_is_kept_and_the_blocks_not_used_for_longest_go_first(tmp_path: Path) -> None:
    """Blocks of another model, and what a killed worker left, count too; other files stay."""
    write(files(tmp_path, fingerprint="0" * 32))
    (tmp_path / ("0" * 32) / "writing-dead").write_bytes(KV)
    photos = tmp_path / "photo.jpg", tmp_path / ("0" * 32) / "photo.jpg"
    for photo in photos:
        photo.write_bytes(KV)
    cache = files(tmp_path, budget=40 * FILE_BYTES)
    for number in range(100):
        write(cache, numbered(number))
        assert cache.touch(numbered(7).prefix_hash, 0) == (number >= 7)
        assert len(kept(tmp_path)) <= 40
    left = {path.name for path in tmp_path.glob("*/*")}
    assert left >= {numbered(n).prefix_hash.hex() for n in (7, 98, 99)}
    assert not left & {NAME.prefix_hash.hex(), "writing-dead"}
    assert all(photo.exists() for photo in photos)


def test_end_of_a_prompt_goes_before_its_beginning(tmp_path: Path) -> None:
    cache = files(tmp_path, budget=40 * FILE_BYTES)
    for number in range(45):
        write(cache, numbered(number, place=number))
    names = {path.name for path in kept(tmp_path)}
    assert names > {numbered(number).prefix_hash.hex() for number in range(36)}


@pytest.mark.parametrize("room", [0, 100])
def test_full_disk_leaves_no_part_of_a_block(tmp_path: Path, room: int) -> None:
    """On this one, files end at `room` bytes."""
    cache, limits = files(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(OSError, match=r"too large|No space"):
            write(cache)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.glob("*/*")) == []
    assert write(cache)


def test_directory_that_was_removed_is_made_again(tmp_path: Path) -> None:
    cache = files(tmp_path / "cache")
    write(cache)
    (tmp_path / "cache").rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError):
        write(cache)
    assert write(cache)
