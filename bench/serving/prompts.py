"""Random prompts of an exact length, as token ids or as text; the same seed gives the same ones."""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path

from bench.serving.target import Prompt
from quire.bench.prompts import single_token_words

_FIRST_ORDINARY_TOKEN = 300  # bytes and special tokens come before


@dataclass(slots=True)
class Prompts:
    """Prompts for the model of a checkpoint; `as_text` for servers that take no token ids."""

    vocab_size: int
    words: list[str] | None = None
    draw: random.Random = field(default_factory=random.Random)

    @classmethod
    def of(cls, checkpoint: Path, seed: int, as_text: bool = False) -> "Prompts":
        config = json.loads((checkpoint / "config.json").read_text())
        words = single_token_words(checkpoint / "tokenizer.json") if as_text else None
        return cls(config["vocab_size"], words, random.Random(seed))

    def one(self, length: int) -> Prompt:
        """`length` tokens."""
        if self.words is None:
            return [
                self.draw.randrange(_FIRST_ORDINARY_TOKEN, self.vocab_size) for _ in range(length)
            ]
        return "".join(self.draw.choices(self.words, k=length))

    def many(self, count: int, length: int) -> list[Prompt]:
        return [self.one(length) for _ in range(count)]

    def sharing(self, prefix: Prompt, count: int, length: int) -> list[Prompt]:
        """`count` prompts that begin with `prefix` and have `length` tokens more."""
        return [joined(prefix, self.one(length)) for _ in range(count)]


def joined(first: Prompt, second: Prompt) -> Prompt:
    if isinstance(first, str) and isinstance(second, str):
        return first + second
    return [*first, *second]
