"""A model's tokens, as llguidance walks them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from llguidance import LLTokenizer, TokenizerWrapper

from services.model.text.tokenizer import Tokenizer
from services.runtime.errors import InvalidRequest


class _Tokens:
    """The bytes of every token, in the form that llguidance asks for. A call would split bytes into
    tokens; nothing asks for that, because grammars force no tokens."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        pieces = tokenizer.pieces.following
        num = min(vocab_size, len(pieces))
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(num)]
        self.tokens += [b""] * (vocab_size - num)  # ids without a token are never allowed
        self.special_token_ids = [
            token_id
            for token_id in range(num)
            if pieces[token_id] is None and self.tokens[token_id]
        ]
        self.eos_token_id = eos_token_id
        self.bos_token_id = None

    def __call__(self, text: bytes) -> list[int]:
        return []


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`special` has the ids of special tokens, which are no text, by name; `ends` has the ids of
    tokens that end a text."""

    tokens: LLTokenizer
    special: Mapping[str, int]
    size: int
    ends: Collection[int]

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]
    ) -> "Vocabulary":
        """The tokens of a model whose logits have `vocab_size` columns. Takes about a second, and
        60 MB, for 150,000 tokens. Raises InvalidRequest if no token ends a text."""
        if not eos_token_ids:
            raise InvalidRequest("structured output needs a model with an end-of-sequence token")
        tokens = _Tokens(tokenizer, vocab_size, min(eos_token_ids))
        return cls(
            LLTokenizer(TokenizerWrapper(tokens), n_vocab=vocab_size, eos_token=[*eos_token_ids]),
            {tokens.tokens[i].decode(): i for i in tokens.special_token_ids},
            vocab_size,
            eos_token_ids,
        )

    @classmethod
    def load(cls, directory: Path, vocab_size: int, eos_token_ids: Collection[int]) -> "Vocabulary":
        """As `of`, with the tokenizer of the model in `directory`."""
        return cls.of(Tokenizer.from_directory(directory), vocab_size, eos_token_ids)
