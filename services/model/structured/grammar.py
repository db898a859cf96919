"""Compiled grammars: which tokens may follow some text."""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import GbnfToLarkError

from services.model.structured.mask import GrammarFault, Mask
from services.model.structured.structural_tags import grammar_of
from services.model.structured.structure import Structure
from services.model.structured.vocabulary import Vocabulary
from services.runtime.errors import InvalidRequest

_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,  # about 20 ms to compile
    max_grammar_size=100_000,
    max_lexer_states=20_000,  # about 2 kB each
    step_lexer_fuel=200_000,  # about 15 ms for a mask
    step_max_items=50_000,
    verbose_errors=False,
)
_QUICK_S = 0.02
"""A grammar that compiles in this time may do so beside a step."""
_MOST_CHARS = 400
"""Of an error, which may quote much of its grammar."""


@dataclass(slots=True)
class Compiled:
    """A compiled structure. Copies of its matcher share the states that their lexer learns, at most
    `max_lexer_states` for all texts together."""

    structure: Structure
    vocabulary: Vocabulary
    matcher: LLMatcher
    seconds: float
    is_worn: bool = False
    """Whether a text has needed more states, so that later requests should compile it again."""

    def again(self, failed: LLMatcher) -> LLMatcher:
        """A matcher that shares nothing with `failed`. GrammarFault: that would not help, or takes
        too long beside a step."""
        if "lexer" not in failed.get_error():
            raise GrammarFault(_problem(failed))
        self.is_worn = True
        if self.seconds > _QUICK_S:
            raise GrammarFault(_problem(failed))
        return compile_structure(self.structure, self.vocabulary).matcher


def compile_structure(structure: Structure, vocabulary: Vocabulary) -> Compiled:
    """Compiles a structure, within limits that keep most of them cheap; `checker` has limits for
    the rest. Releases the interpreter's lock. Raises InvalidRequest if the structure is wrong or
    too complex; the message names the structure as the request does."""
    began = time.perf_counter()
    try:
        grammar = grammar_of(structure, vocabulary.special)
    except RecursionError as error:
        raise InvalidRequest("is nested too deeply") from error
    except (GbnfToLarkError, ValueError) as error:
        raise InvalidRequest(f"is wrong: {error}") from error
    matcher = LLMatcher(vocabulary.tokens, grammar, log_level=0, limits=_LIMITS)
    matcher.compute_bitmask()  # the lexer finds out only now what the start costs
    if matcher.is_error():
        raise InvalidRequest(f"cannot be compiled: {_problem(matcher)}")
    return Compiled(structure, vocabulary, matcher, time.perf_counter() - began)


def _problem(matcher: LLMatcher) -> str:
    """The error of a matcher, in one line."""
    text = " ".join(matcher.get_error().split())
    if text.startswith("NoExtension"):
        return "no text has this form"
    return text if len(text) <= _MOST_CHARS else text[:_MOST_CHARS] + " ..."


class Grammar:
    """A structure's grammar for a vocabulary. `compiled` is done before a walk is used."""

    def __init__(self, compiled: "Future[Compiled]", vocab_size: int) -> None:
        self.compiled = compiled
        self.num_words = -(-vocab_size // 32)

    @property
    def is_worn(self) -> bool:
        compiled = self.compiled
        return compiled.done() and compiled.exception() is None and compiled.result().is_worn

    def walk(self) -> "GrammarWalk":
        return GrammarWalk(self)


class GrammarWalk:
    """Follows one text through a grammar. A mask depends on the tokens before it alone (law 7);
    what is kept from call to call saves time. One thread at a time may use it."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._matcher: LLMatcher | None = None
        self._walked: list[int] = []

    def mask_after(self, tokens: Sequence[int], num_drafts: int = 0) -> Mask:
        """The tokens that may follow `tokens`, which begin the text. Raises GrammarFault. The last
        `num_drafts` tokens may be wrong: if they do not have the form, this costs nothing else."""
        compiled = self._grammar.compiled.result()
        if self._matcher is None:
            self._matcher = compiled.matcher.deep_copy()
        mask = np.empty(self._grammar.num_words, np.int32)
        if num_drafts and not self._follows(self._matcher, tokens):
            raise GrammarFault("the drafts do not have the form")
        self._fill(self._matcher, list(tokens), mask)
        if self._matcher.is_error():
            self._matcher, self._walked = compiled.again(self._matcher), []
            self._fill(self._matcher, list(tokens), mask)
            if self._matcher.is_error():
                raise GrammarFault(_problem(self._matcher))
        return mask

    def _follows(self, matcher: LLMatcher, tokens: Sequence[int]) -> bool:
        rest = list(tokens[self._go_back(matcher, tokens) :])
        return int(matcher.validate_tokens(rest)) == len(rest)

    def _go_back(self, matcher: LLMatcher, tokens: Sequence[int]) -> int:
        """Go back to where the walked text begins like `tokens`. Returns how many that are."""
        num_same = len(self._walked)
        if list(tokens[:num_same]) != self._walked:
            pairs = enumerate(zip(tokens, self._walked, strict=False))
            num_same = next((i for i, (a, b) in pairs if a != b), min(len(tokens), num_same))
            matcher.rollback(len(self._walked) - num_same)
            self._walked = self._walked[:num_same]
        return num_same

    def _fill(self, matcher: LLMatcher, tokens: list[int], mask: Mask) -> None:
        matcher.consume_tokens(tokens[self._go_back(matcher, tokens) :])
        self._walked = tokens
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
