"""Prompts have exactly the length that was asked for, as ids and as text."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from bench.make_checkpoint import SHAPES, make_checkpoint
from bench.serving.prompts import Prompts

EMBEDDED = Path(__file__).parents[3] / "quire" / "embedded"


@pytest.fixture(scope="module")
def random_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), SHAPES["tiny"], vocab_size=2048)


@pytest.mark.parametrize("embedded", [True, False])
@pytest.mark.parametrize("length", [1, 17, 512])
def test_text_has_as_many_tokens_as_asked_for(
    random_checkpoint: Path, embedded: bool, length: int
) -> None:
    checkpoint = EMBEDDED if embedded else random_checkpoint
    text = Prompts.of(checkpoint, seed=0, as_text=True).one(length)
    assert isinstance(text, str)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    assert len(tokenizer.encode(text, add_special_tokens=False).ids) == length


def test_ids_are_of_the_vocabulary(random_checkpoint: Path) -> None:
    ids = Prompts.of(random_checkpoint, seed=0).one(1000)
    assert len(ids) == 1000
    assert all(isinstance(id_, int) and 300 <= id_ < 2048 for id_ in ids)


def test_a_seed_names_its_prompts(random_checkpoint: Path) -> None:
    first, again, other = (Prompts.of(random_checkpoint, seed).one(64) for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize("as_text", [True, False])
def test_prompts_share_their_prefix_and_nothing_else(
    random_checkpoint: Path, as_text: bool
) -> None:
    prompts = Prompts.of(random_checkpoint, seed=0, as_text=as_text)
    prefix = prompts.one(32)
    first, second = prompts.sharing(prefix, 2, 64)
    assert first[: len(prefix)] == second[: len(prefix)] == prefix
    assert first[len(prefix) :] != second[len(prefix) :]
