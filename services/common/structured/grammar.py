"""Compiled grammars: which tokens may follow some text."""

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from services.common.errors import InvalidRequest
from services.common.structured.grammars import grammar_of
from services.common.structured.structure import Structure
from services.common.structured.vocabulary import Vocabulary

Mask = np.ndarray[tuple[int], np.dtype[np.int32]]
"""Bit i % 32 of word i // 32 says whether token i may come next."""

_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,  # about 20 ms to compile
    max_grammar_size=100_000,
    max_lexer_states=20_000,  # about 2 kB each
    step_lexer_fuel=200_000,  # about 15 ms for a mask
    step_max_items=50_000,
    verbose_errors=False,
)


_MOST_CHARS = 400
"""Of an error, which may quote much of its grammar."""


class GrammarFault(Exception):
    """The grammar cannot say which tokens may come: it is too complex at this place, or the text
    before does not follow it."""


def compile_structure(structure: Structure, vocabulary: Vocabulary) -> LLMatcher:
    """Compiles a structure, in bounded time and memory. Releases the interpreter's lock. Raises
    InvalidRequest if it is wrong or too complex."""
    grammar = grammar_of(structure, vocabulary.special)
    matcher = LLMatcher(vocabulary.tokens, grammar, log_level=0, limits=_LIMITS)
    matcher.compute_bitmask()  # the lexer finds out only now what the start costs
    if matcher.is_error():
        kind = structure.kind.value
        raise InvalidRequest(f"structured output: {kind} cannot be compiled: {_problem(matcher)}")
    return matcher


def _problem(matcher: LLMatcher) -> str:
    """The error of a matcher, in one line."""
    text = " ".join(matcher.get_error().split())
    if text.startswith("NoExtension"):
        return "no text has this form"
    return text if len(text) <= _MOST_CHARS else text[:_MOST_CHARS] + " ..."


class Grammar:
    """A structure's grammar for a vocabulary. `compiled` is done before a walk is used."""

    def __init__(self, compiled: "Future[LLMatcher]", vocab_size: int) -> None:
        self.compiled = compiled
        self.num_words = -(-vocab_size // 32)

    def walk(self) -> "GrammarWalk":
        return GrammarWalk(self)


class GrammarWalk:
    """Follows one text through a grammar. A mask depends on the tokens before it alone (law 7);
    what is kept from call to call saves time. One thread at a time may use it."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._num_words = grammar.num_words
        self._matcher: LLMatcher | None = None
        self._walked: list[int] = []

    def mask_after(self, tokens: Sequence[int]) -> Mask:
        """The tokens that may follow `tokens`, which begin the text. Raises GrammarFault."""
        if self._matcher is None:
            self._matcher = self._grammar.compiled.result().deep_copy()
        matcher, walked = self._matcher, self._walked
        num_same = len(walked)
        if tokens[:num_same] != walked:
            pairs = enumerate(zip(tokens, walked, strict=False))
            num_same = next((i for i, (a, b) in pairs if a != b), min(len(tokens), num_same))
            matcher.rollback(len(walked) - num_same)
        matcher.consume_tokens(list(tokens[num_same:]))
        self._walked = list(tokens)
        mask = np.empty(self._num_words, np.int32)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            raise GrammarFault(_problem(matcher))
        return mask
