"""The token ids of prompts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer as RawTokenizer
from tokenizers.processors import TemplateProcessing

from bench.make_checkpoint import CheckpointSpec, make_checkpoint
from services.gateway.chat.prompts import tokenize_prompt
from services.model.text.tokenizer import Tokenizer

BOS = 256


async def test_an_empty_text_is_what_the_tokenizer_adds_to_texts(tmp_path: Path) -> None:
    """A model with BOS generates from BOS; for others there is nothing to begin with."""
    directory = Path(make_checkpoint(tmp_path, CheckpointSpec()))
    model: Any = SimpleNamespace(
        tokenizer=Tokenizer.from_directory(directory), config=SimpleNamespace(vocab_size=400)
    )
    assert await tokenize_prompt("", model, 64) == ()
    path = str(directory / "tokenizer.json")
    raw = RawTokenizer.from_file(path)
    raw.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    raw.save(path)
    model.tokenizer = Tokenizer.from_directory(directory)
    assert await tokenize_prompt("", model, 64) == (BOS,)
    assert await tokenize_prompt("", model, 64, add_special_tokens=False) == ()
