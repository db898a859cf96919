"""The token ids of prompts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.processors import TemplateProcessing

from bench.make_checkpoint import CheckpointSpec, make_checkpoint
from services.gateway.api import GenerationRequest, Truncation
from services.gateway.chat.prompts import resolved, tokenize_prompt
from services.model.text.tokenizer import Tokenizer
from services.runtime.errors import InvalidRequest

BOS = 256


async def test_an_empty_text_is_what_the_tokenizer_adds_to_texts(tmp_path: Path) -> None:
    """A model with BOS generates from BOS; for others there is nothing to begin with."""
    directory = Path(make_checkpoint(tmp_path, CheckpointSpec()))
    model: Any = SimpleNamespace(
        tokenizer=Tokenizer.from_directory(directory), config=SimpleNamespace(vocab_size=400)
    )
    assert await tokenize_prompt(GenerationRequest(""), model, 64) == ()
    path = str(directory / "tokenizer.json")
    raw = RawTokenizer.from_file(path)
    raw.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    raw.save(path)
    model.tokenizer = Tokenizer.from_directory(directory)
    assert await tokenize_prompt(GenerationRequest(""), model, 64) == (BOS,)
    asked = GenerationRequest("", add_special_tokens=False)
    assert await tokenize_prompt(asked, model, 64) == ()


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("side", ["left", "right"])
async def test_a_truncated_text_is_that_of_the_tokenizers_own_truncation(
    tmp_path: Path, side: Literal["left", "right"], special: bool
) -> None:
    """Special tokens at both ends stay, and so does the rest of a text of which only a part is
    tokenized."""
    directory = Path(make_checkpoint(tmp_path, CheckpointSpec()))
    path = str(directory / "tokenizer.json")
    raw = RawTokenizer.from_file(path)
    tokens = [("<bos>", BOS), ("<eos>", BOS + 1)]
    raw.post_processor = TemplateProcessing(single="<bos> $A <eos>", special_tokens=tokens)
    raw.save(path)
    model: Any = SimpleNamespace(
        tokenizer=Tokenizer.from_directory(directory), config=SimpleNamespace(vocab_size=400)
    )
    raw.enable_truncation(9, direction=side)
    for text in ("short", "a longer text", "beginning " + "of many words " * 20_000 + "at its end"):
        cut = Truncation(9, side)
        asked = GenerationRequest(text, add_special_tokens=special, truncation=cut)
        found = await tokenize_prompt(asked, model, 64)
        assert found == tuple(raw.encode(text, add_special_tokens=special).ids)
    ids = tuple(range(100))
    kept = ids[-9:] if side == "left" else ids[:9]
    asked = GenerationRequest(ids, truncation=Truncation(9, side))
    assert await tokenize_prompt(asked, model, 64) == kept


@pytest.mark.parametrize("number", [0, -2, 65])
def test_a_wrong_truncation_is_refused(number: int) -> None:
    assert resolved(Truncation(-1, "left"), 64) == Truncation(64, "left")
    with pytest.raises(InvalidRequest, match=rf"truncate_prompt_tokens is {number}, not -1 or in"):
        resolved(Truncation(number, "left"), 64)
