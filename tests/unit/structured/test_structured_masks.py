"""Grammars as masks: which tokens may follow some text, as a function of that text alone."""

import json
import math
import random
from typing import Annotated, Any, Literal

import pydantic
import pytest
from llguidance import LLParserLimits

from services.engine.sequences.grammar_state import GrammarState
from services.model.structured.mask import GrammarFault
from services.runtime.errors import InvalidRequest
from tests.forms import EOS, VOCAB_SIZE, Forms, allowed


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"


class Dog(pydantic.BaseModel):
    kind: Literal["dog"] = "dog"
    name: str


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
        ("json", '{"const": [1]}', ["[1]", "[\n  1\n]", "[ 1]"], ["[\n\n1]", "[     1]", " [1]"]),
        ("json", '{"const": [1], "x-guidance": {"whitespace_flexible": false}}', ["[1]"], ["[ 1]"]),
        ("regex", r"[ab]+\d", ["a1", "bb2"], ["a", "1", "a12", "a٣"]),
        ("regex", r"[\d\w]\\d\D\W/\.", ["a\\dé /."], ["é\\dé /.", "a\\d1 /."]),
        ("choice", '["yes", "no", "né\\n"]', ["yes", "no", "né\n"], ["ye", "noo", ""]),
        ("grammar", 'start: "x" (start)? "y"', ["xy", "xxyy"], ["x", "xyy"]),
        ("grammar", 'root ::= "a" | "b" root', ["a", "bba"], ["b", "ab"]),
        ("grammar", '?start: "a" | b\n!b: "c"', ["a", "c"], ["b"]),
    ],
)
def test_a_text_ends_only_where_it_has_the_form(
    forms: Forms, kind: str, form: str, good: list[str], bad: list[str]
) -> None:
    assert [text for text in good if not forms.accepts(kind, form, text)] == []
    assert [text for text in bad if forms.accepts(kind, form, text)] == []


def integer_tag(begin: str, end: str) -> dict[str, Any]:
    content = {"type": "json_schema", "json_schema": {"type": "integer"}}
    return {"type": "tag", "begin": begin, "content": content, "end": end}


TAGS = [integer_tag("<f=a>", "</f>"), integer_tag("<f=b>", "</f>")]
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": TAGS}
SEPARATED = {"type": "tags_with_separator", "tags": TAGS, "separator": ","}
THINK = {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (TRIGGERED, ["", "hi", "hi <f=a>1</f> x <f=b>2</f>"], ["<f=c", "<f=a>x</f>", "<f=a>1"]),
        (
            {**TRIGGERED, "at_least_one": True},
            ["<f=a>1</f>", "<f=a>1</f> x"],
            ["", "hi <f=a>1</f>"],
        ),
        ({**TRIGGERED, "stop_after_first": True}, ["x", "x<f=a>1</f>"], ["<f=a>1</f> x"]),
        (
            {**TRIGGERED, "at_least_one": True, "stop_after_first": True},
            ["<f=a>1</f>", "<f=b>-7</f>"],
            ["", "x<f=a>1</f>", "<f=a>1</f>x"],
        ),
        ({**TRIGGERED, "excludes": ["no"]}, ["n<f=a>1</f>on"], ["no", "<f=a>1</f> no"]),
        (SEPARATED, ["", "<f=a>1</f>", "<f=a>1</f>,<f=b>2</f>"], ["<f=a>1</f>,", "x"]),
        ({**SEPARATED, "at_least_one": True}, ["<f=b>1</f>"], [""]),
        (
            {"type": "sequence", "elements": [THINK, TAGS[0]]},
            ["<t>a</b></t><f=a>1</f>"],
            ["<t></t>"],
        ),
        ({"type": "or", "elements": [THINK, TAGS[0]]}, ["<t></t>", "<f=a>1</f>"], ["<t></t>x"]),
        ({"type": "optional", "content": TAGS[0]}, ["", "<f=a>1</f>"], ["<f=a>1</f><f=a>1</f>"]),
        ({"type": "plus", "content": TAGS[0]}, ["<f=a>1</f><f=a>1</f>"], [""]),
        (
            {"type": "star", "content": {"type": "regex", "pattern": r"a/\d"}},
            ["", "a/1a/2"],
            ["a/"],
        ),
        ({"type": "const_string", "value": 'a"/\n'}, ['a"/\n'], ["a", ""]),
        ({"type": "choice", "choices": ["a", 'b"']}, ["a", 'b"'], ["b", ""]),
        ({"type": "grammar", "grammar": 'root ::= "x" root | "y"'}, ["xxy"], ["x"]),
    ],
)
def test_structural_tags(forms: Forms, form: Any, good: list[str], bad: list[str]) -> None:
    text = json.dumps({"type": "structural_tag", "format": form})
    assert [one for one in good if not forms.accepts("structural_tag", text, one)] == []
    assert [one for one in bad if forms.accepts("structural_tag", text, one)] == []


def test_older_structural_tags(forms: Forms) -> None:
    structure = {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}
    text = json.dumps({"structures": [structure], "triggers": ["<f="]})
    assert forms.accepts("structural_tag", text, "hi <f=a>1</f>")
    assert not forms.accepts("structural_tag", text, "hi <f=a>x</f>")


def test_names_of_special_tokens_in_tags_are_these_tokens(forms: Forms) -> None:
    name, token_id = next((n, i) for n, i in forms.vocabulary.special.items() if i != EOS)
    tag = {**integer_tag(f"{name}f:", ";"), "content": {"type": "any_text"}}
    form = {"type": "triggered_tags", "triggers": [name], "tags": [tag]}
    walk = forms.grammar("structural_tag", json.dumps({"format": form})).walk()
    tokens = list(forms.tokenizer.encode("hi"))
    assert token_id in allowed(walk.mask_after(tokens))
    tokens.append(token_id)
    assert forms.texts(allowed(walk.mask_after(tokens))) <= {"f", "f:"}
    tokens += forms.tokenizer.encode("f:x;")
    assert EOS in allowed(walk.mask_after(tokens))


@pytest.mark.parametrize(
    ("form", "problem"),
    [
        ({"type": "token"}, "type 'token' is not one of const_string"),
        ({"type": "json_schema"}, "lacks a field"),
        ({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}, "style of json_schema"),
        ({**TRIGGERED, "triggers": ["<g="]}, "'<f=a>' begins with 0 of the triggers"),
        ({**THINK, "end": ""}, "needs an end"),
        ({"type": "sequence", "elements": []}, "lacks a field"),
        ({**THINK, "end": 7}, "the end of a tag is a string"),
        ({}, "type None"),
        ("x", 'neither "format"'),
    ],
)
def test_wrong_structural_tags_are_refused_with_the_reason(
    forms: Forms, form: Any, problem: str
) -> None:
    text = json.dumps({"format": form})
    with pytest.raises(InvalidRequest, match=problem):
        forms.grammar("structural_tag", text)


def test_masks_are_those_of_the_tokens_before_them(forms: Forms) -> None:
    """The tokens came one by one, all at once, or after others that were removed again."""
    form = forms.grammar("json", OBJECT)
    tokens = forms.tokenizer.encode('{"a": 12}')
    walk = form.walk()
    one_by_one = [allowed(walk.mask_after(tokens[:n])) for n in range(len(tokens) + 1)]
    at_once = [allowed(form.walk().mask_after(tokens[:n])) for n in range(len(tokens) + 1)]
    backwards = [allowed(walk.mask_after(tokens[:n])) for n in range(len(tokens), -1, -1)]
    assert one_by_one == at_once == backwards[::-1]
    other = forms.tokenizer.encode('{ "a":9')
    assert allowed(walk.mask_after(other)) == allowed(form.walk().mask_after(other))
    assert one_by_one[-1] == [EOS]
    assert forms.texts(one_by_one[0]) >= {"{"}


def test_a_state_sees_the_generated_tokens_only(forms: Forms) -> None:
    form, prompt = forms.grammar("choice", '["ab", "ac"]'), [1, 2, 3]
    tokens = list(prompt)
    state = GrammarState(form, tokens, len(prompt))
    first = allowed(state.mask())
    tokens += forms.tokenizer.encode("a")
    assert forms.texts(allowed(state.mask())) == {"b", "c"}
    assert first == allowed(form.walk().mask_after([]))


def test_a_state_behind_drafts_is_that_of_tokens(forms: Forms) -> None:
    """A draft that the grammar forbids is a fault, and leaves the state as it was."""
    form, tokens = forms.grammar("regex", "(ab|cd)*e"), list(forms.tokenizer.encode("ab"))
    state = GrammarState(form, tokens, 0)
    for text in ("c", "cd", "cdab", "cx", "x", "cdc", "a"):
        assert {"a", "c", "e"} < forms.texts(allowed(state.mask()))
        drafts = tuple(forms.tokenizer.encode(text))
        for number in range(1, len(drafts) + 1):
            behind = state.behind(drafts[:number])
            if "x" in text[:number]:
                with pytest.raises(GrammarFault, match="drafts"):
                    behind.mask()
            else:
                alone = form.walk().mask_after([*tokens, *drafts[:number]])
                assert allowed(behind.mask()) == allowed(alone)
    tokens += forms.tokenizer.encode("e")
    assert allowed(state.mask()) == [EOS]


def test_tokens_that_do_not_follow_the_grammar_are_a_fault(forms: Forms) -> None:
    walk = forms.grammar("json", OBJECT).walk()
    with pytest.raises(GrammarFault, match="grammar"):
        walk.mask_after(forms.tokenizer.encode("no object"))


def test_a_lexer_that_has_learnt_too_much_is_replaced(
    forms: Forms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar's lexer states come from all texts together; no text may suffer from the others,
    nor have other masks."""
    module, regex = "services.model.structured.grammar", r".*a.{60}"
    wanted = forms.grammar("regex", regex)
    limits = LLParserLimits(max_lexer_states=150, verbose_errors=False)
    monkeypatch.setattr(f"{module}._LIMITS", limits)
    monkeypatch.setattr(f"{module}._QUICK_S", math.inf)  # on a busy machine another takes longer
    form, chance = forms.grammar("regex", regex), random.Random(3)
    for _ in range(20):
        walk, expected, tokens = form.walk(), wanted.walk(), list[int]()
        for _ in range(12):
            may_come = allowed(walk.mask_after(tokens))
            assert may_come == allowed(expected.mask_after(tokens))
            tokens.append(chance.choice([token for token in may_come if token != EOS]))
    assert form.is_worn
    monkeypatch.setattr(f"{module}._QUICK_S", 0.0)  # no time for another
    with pytest.raises(GrammarFault, match="too many states"):
        form.walk().mask_after(tokens)


def test_special_tokens_and_ids_without_a_token_are_never_text(forms: Forms) -> None:
    found = allowed(forms.grammar("regex", r"(.|\n)*").walk().mask_after([]))
    assert forms.tokenizer.vocab_size < VOCAB_SIZE
    assert max(found) < forms.tokenizer.vocab_size
    assert {i for i in found if forms.tokenizer.pieces.following[i] is None} == {EOS}


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        ("json", "{", "is wrong: Expecting property name"),
        ("json", "[1]", "a JSON schema is an object"),
        ("json", '{"type": "objekt"}', "cannot be compiled: .*objekt"),
        ("json", '{"type": "array", "uniqueItems": true}', "Unimplemented keys"),
        ("json", '{"$ref": "http://elsewhere/schema"}', "cannot be compiled"),
        ("json", '{"allOf": [{"type": "string"}, {"type": "number"}]}', "cannot be compiled"),
        ("regex", "(", "cannot be compiled: .*regex parse error"),
        ("regex", "a(?=b)", "look-around"),
        ("choice", "[]", "at least one string"),
        ("choice", '["a", 1]', "a choice is not a string"),
        ("choice", '"a"', "at least one string"),
        ("grammar", "start: missing", "cannot be compiled"),
        ("grammar", "root ::= (", "is wrong"),
    ],
)
def test_wrong_forms_are_refused_with_the_reason(
    forms: Forms, kind: str, text: str, problem: str
) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        forms.grammar(kind, text)


PETS = pydantic.TypeAdapter(
    Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]
).json_schema()


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, "-7"),
        ({"type": "number", "minimum": -1.7976931348623157e308}, "1.5"),
        ({"type": "number", "exclusiveMinimum": 5e-324}, "0.5"),
        ({"type": "number", "minimum": 0, "maximum": 5e-324}, "0"),
        ({"type": "number", "maximum": -2.2250738585072014e-308}, "-1.5"),
        (PETS, '{"kind":"dog","name":"Rex"}'),
        ({"type": "array", "uniqueItems": False}, "[1]"),
        ({"properties": {"format": {"type": "string", "format": "phone"}}}, '{"format":"1"}'),
        ({"anyOf": [{"type": "string", "format": "binary"}, {"type": "null"}]}, '"x"'),
    ],
)
def test_schemas_as_clients_write_them_are_served(
    forms: Forms, schema: dict[str, Any], text: str
) -> None:
    assert forms.accepts("json", json.dumps(schema), text)


NUMBERS = [f'"{number * 7919 % 100_003}"' for number in range(20_000)]


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("choice", f"[{','.join(NUMBERS)}]"),
        ("grammar", f"root ::= {' | '.join(NUMBERS)}"),
        ("grammar", f"start: number\nnumber: {' | '.join(NUMBERS)}\nother: number"),
        ("json", f'{{"enum": [{",".join(number[1:-1] for number in NUMBERS)}]}}'),
    ],
)
def test_many_alternatives_are_one_expression(forms: Forms, kind: str, form: str) -> None:
    assert forms.accepts(kind, form, "7919")
    assert not forms.accepts(kind, form, "7918")


def test_every_token_that_continues_the_form_is_allowed(forms: Forms) -> None:
    """Also where only one text is possible: the model chooses how to split it into tokens."""
    pieces = [forms.tokenizer.decode([token]) for token in range(forms.tokenizer.vocab_size)]
    word = max((piece for piece in pieces if piece.isalpha()), key=len)
    may_come = allowed(forms.grammar("choice", f'["{word}"]').walk().mask_after([]))
    assert forms.texts(may_come) == {piece for piece in pieces if piece and word.startswith(piece)}
    assert len(may_come) > 1


def test_options_of_the_library_are_not_the_clients(forms: Forms) -> None:
    """`lenient` would switch off the keywords that are not supported."""
    wrong = {"not": {"const": 1}, "x-guidance": {"lenient": True, "whitespace_flexible": False}}
    with pytest.raises(InvalidRequest, match="not"):
        forms.grammar("json", json.dumps(wrong))
    separated = {"const": [1, 2], "x-guidance": {"item_separator": ";"}}
    assert forms.accepts("json", json.dumps(separated), "[1,2]")
