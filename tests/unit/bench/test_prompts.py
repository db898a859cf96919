"""Prompts have exactly the requested length, as ids and as text."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from bench.make_checkpoint import SHAPES, make_checkpoint
from bench.serving.scenarios import prompts_of
from quire.bench.prompts import Prompts, single_token_words
from services.model.text.tokenizer import read_tokenizer


@pytest.fixture(scope="module")
def random_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), SHAPES["tiny"], vocab_size=2048)


@pytest.fixture(scope="module")
def real_tokenizer(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer of SmolLM2 as a tokenizer.json."""
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    read_tokenizer(smollm2).save(str(file))
    return file


@pytest.mark.parametrize("real", [True, False])
@pytest.mark.parametrize("length", [1, 17, 512])
def test_text_has_as_many_tokens_as_asked_for(
    random_checkpoint: Path, real_tokenizer: Path, real: bool, length: int
) -> None:
    file = real_tokenizer if real else random_checkpoint / "tokenizer.json"
    text = Prompts(0, single_token_words(file)).draw(length)
    assert isinstance(text, str)
    assert len(Tokenizer.from_file(str(file)).encode(text, add_special_tokens=False).ids) == length


def test_ids_are_of_the_vocabulary(random_checkpoint: Path) -> None:
    ids = prompts_of(random_checkpoint, seed=0).draw(1000)
    assert len(ids) == 1000
    assert all(isinstance(id_, int) and 300 <= id_ < 2048 for id_ in ids)


def test_a_seed_names_its_prompts(random_checkpoint: Path) -> None:
    first, again, other = (prompts_of(random_checkpoint, seed).draw(64) for seed in (1, 1, 2))
    assert first == again
    assert first != other
