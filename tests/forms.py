"""Forms of texts for the vocabulary of a tiny checkpoint."""

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from services.model.structured.grammar import Compiled, Grammar, compile_structure
from services.model.structured.mask import Mask
from services.model.structured.structure import Structure, StructureKind
from services.model.structured.vocabulary import Vocabulary
from services.model.text.tokenizer import Tokenizer

EOS, VOCAB_SIZE = 257, 400


def allowed(mask: Mask) -> list[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    found: list[int] = bits.nonzero()[0].tolist()
    return found


class Forms:
    def __init__(self, checkpoint: Path) -> None:
        self.tokenizer = Tokenizer.from_directory(checkpoint)
        self.vocabulary = Vocabulary.of(self.tokenizer, VOCAB_SIZE, [EOS])

    def grammar(self, kind: str | StructureKind, text: str) -> Grammar:
        compiled: Future[Compiled] = Future()
        structure = Structure(StructureKind(kind), text)
        compiled.set_result(compile_structure(structure, self.vocabulary))
        return Grammar(compiled, VOCAB_SIZE)

    def accepts(self, kind: str | StructureKind, form: str, text: str) -> bool:
        """Whether the text has the form: each token may follow, and then the end may."""
        walk, tokens = self.grammar(kind, form).walk(), list[int]()
        for token in (*self.tokenizer.encode(text), EOS):
            if token not in allowed(walk.mask_after(tokens)):
                return False
            tokens.append(token)
        return True

    def texts(self, token_ids: Sequence[int]) -> set[str]:
        return {self.tokenizer.decode([i], skip_special_tokens=False) for i in token_ids}
