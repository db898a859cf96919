"""Compiles the grammars of requests for structured output, in a thread, and keeps the last ones."""

from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

from services.model.structured.grammar import Compiled, Grammar, compile_structure
from services.model.structured.structure import Structure
from services.model.structured.vocabulary import Vocabulary
from services.runtime.errors import InvalidRequest

_MOST_GRAMMARS = 32


class Grammars:
    """The grammars of one worker, for the vocabulary of the model in `directory`, which is read for
    the first of them at the latest. A gateway has compiled each before, so all compile here."""

    def __init__(self, directory: Path, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._directory = directory
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._recent: OrderedDict[Structure, Grammar] = OrderedDict()

    def warm_up(self) -> None:
        """Read the vocabulary, in the background: it takes seconds for the largest ones."""
        self._thread.submit(lambda: self._vocabulary)

    def get(self, structure: Structure) -> Grammar:
        """The structure's grammar, which may still be being compiled."""
        grammar = self._recent.get(structure)
        if grammar is None or grammar.is_worn:
            compiled = self._thread.submit(self._compile, structure)
            grammar = self._recent[structure] = Grammar(compiled, self._vocab_size)
            while len(self._recent) > _MOST_GRAMMARS:
                self._recent.popitem(last=False)
        self._recent.move_to_end(structure)
        return grammar

    def _compile(self, structure: Structure) -> Compiled:
        try:
            return compile_structure(structure, self._vocabulary)
        except InvalidRequest as error:
            raise InvalidRequest(f"structured output {error}") from error

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary.load(self._directory, self._vocab_size, self._eos_token_ids)
