"""Grammars as masks: which tokens may follow some text, as a function of that text alone."""

import json
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from bench.make_checkpoint import CheckpointSpec, make_checkpoint
from services.common.errors import InvalidRequest
from services.common.structured.grammar import Grammar, GrammarFault, compile_structure
from services.common.structured.structure import Structure, StructureKind
from services.common.structured.vocabulary import vocabulary_of
from services.common.text.tokenizer import Tokenizer
from services.engine.sequences.grammar_state import GrammarState

EOS = 257
VOCAB_SIZE = 400


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tiny")
    return Tokenizer.from_directory(Path(make_checkpoint(directory, CheckpointSpec())))


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    return vocabulary_of(tokenizer, VOCAB_SIZE, [EOS])


def grammar(vocabulary: LLTokenizer, kind: str, text: str) -> Grammar:
    compiled: Future[LLMatcher] = Future()
    compiled.set_result(compile_structure(Structure(StructureKind(kind), text), vocabulary))
    return Grammar(compiled, VOCAB_SIZE)


def allowed(mask: np.ndarray[tuple[int], np.dtype[np.int32]]) -> list[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    found: list[int] = bits.nonzero()[0].tolist()
    return found


def texts(tokenizer: Tokenizer, token_ids: Sequence[int]) -> set[str]:
    return {tokenizer.decode([i], skip_special_tokens=False) for i in token_ids}


def accepts(vocabulary: LLTokenizer, tokenizer: Tokenizer, kind: str, form: str, text: str) -> bool:
    """Whether the text has the form: each token may come, and then the end may."""
    walk = grammar(vocabulary, kind, form).walk()
    tokens: list[int] = []
    for token in (*tokenizer.encode(text), EOS):
        if token not in allowed(walk.mask_after(tokens)):
            return False
        tokens.append(token)
    return True


OBJECT = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
)


@pytest.mark.parametrize(
    ("kind", "form", "good", "bad"),
    [
        ("json", OBJECT, ['{"a": 1}', '{"a":-20}', '{\n"a": 0}'], ['{"a": 1.5}', "{}", "[1]"]),
        ("json", "", ["{}", '{"x": [1, null]}'], ["[]", "1", ""]),
        ("json", "true", ["{}", "1", "[]"], ["", "x"]),
        ("regex", r"[ab]+\d", ["a1", "bb2"], ["a", "1", "a12"]),
        ("choice", '["yes", "no", "né\\n"]', ["yes", "no", "né\n"], ["ye", "noo", ""]),
        ("grammar", 'start: "x" (start)? "y"', ["xy", "xxyy"], ["x", "xyy"]),
        ("grammar", 'root ::= "a" | "b" root', ["a", "bba"], ["b", "ab"]),
    ],
)
def test_a_text_ends_only_where_it_has_the_form(
    vocabulary: LLTokenizer,
    tokenizer: Tokenizer,
    kind: str,
    form: str,
    good: list[str],
    bad: list[str],
) -> None:
    assert [text for text in good if not accepts(vocabulary, tokenizer, kind, form, text)] == []
    assert [text for text in bad if accepts(vocabulary, tokenizer, kind, form, text)] == []


def test_masks_are_those_of_the_tokens_before_them(
    vocabulary: LLTokenizer, tokenizer: Tokenizer
) -> None:
    """Whether the tokens came one by one, all at once, or others came first and went again."""
    form = grammar(vocabulary, "json", OBJECT)
    tokens = tokenizer.encode('{"a": 12}')
    walk = form.walk()
    one_by_one = [allowed(walk.mask_after(tokens[:n])) for n in range(len(tokens) + 1)]
    at_once = [allowed(form.walk().mask_after(tokens[:n])) for n in range(len(tokens) + 1)]
    backwards = [allowed(walk.mask_after(tokens[:n])) for n in range(len(tokens), -1, -1)]
    assert one_by_one == at_once == backwards[::-1]
    other = tokenizer.encode('{ "a":9')
    assert allowed(walk.mask_after(other)) == allowed(form.walk().mask_after(other))
    assert one_by_one[-1] == [EOS]
    assert texts(tokenizer, one_by_one[0]) >= {"{"}


def test_a_state_sees_the_generated_tokens_only(
    vocabulary: LLTokenizer, tokenizer: Tokenizer
) -> None:
    form, prompt = grammar(vocabulary, "choice", '["ab", "ac"]'), [1, 2, 3]
    tokens = list(prompt)
    state = GrammarState(form, tokens, len(prompt))
    first = allowed(state.mask())
    tokens += tokenizer.encode("a")
    assert texts(tokenizer, allowed(state.mask())) == {"b", "c"}
    assert first == allowed(form.walk().mask_after([]))


def test_tokens_that_do_not_follow_the_grammar_are_a_fault(
    vocabulary: LLTokenizer, tokenizer: Tokenizer
) -> None:
    walk = grammar(vocabulary, "json", OBJECT).walk()
    with pytest.raises(GrammarFault, match="grammar"):
        walk.mask_after(tokenizer.encode("no object"))


def test_special_tokens_and_ids_without_a_token_are_never_text(
    vocabulary: LLTokenizer, tokenizer: Tokenizer
) -> None:
    found = allowed(grammar(vocabulary, "regex", r"(.|\n)*").walk().mask_after([]))
    assert tokenizer.vocab_size < VOCAB_SIZE
    assert max(found) < tokenizer.vocab_size
    assert {i for i in found if tokenizer.pieces.following[i] is None} == {EOS}


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        ("json", "{", "the json is wrong: Expecting property name"),
        ("json", "[1]", "a JSON schema is an object"),
        ("json", '{"type": "objekt"}', "json cannot be compiled: .*objekt"),
        ("json", '{"type": "array", "uniqueItems": true}', "Unimplemented keys"),
        ("json", '{"$ref": "http://elsewhere/schema"}', "json cannot be compiled"),
        ("json", '{"allOf": [{"type": "string"}, {"type": "number"}]}', "cannot be compiled"),
        ("regex", "(", "regex cannot be compiled: .*regex parse error"),
        ("regex", "a(?=b)", "look-around"),
        ("choice", "[]", "at least one string"),
        ("choice", '["a", 1]', "a choice is not a string"),
        ("choice", '"a"', "at least one string"),
        ("grammar", "start: missing", "grammar cannot be compiled"),
        ("grammar", "root ::= (", "the grammar is wrong"),
    ],
)
def test_wrong_forms_are_refused_with_the_reason(
    vocabulary: LLTokenizer, kind: str, text: str, problem: str
) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        grammar(vocabulary, kind, text)
