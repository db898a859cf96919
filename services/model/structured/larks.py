"""Lark grammars of the texts that a regular expression, or a grammar of a client, describes."""

import json
import re

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

_ASCII = {r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[0-9A-Za-z_]", r"\W": "[^0-9A-Za-z_]"}

_MOST_RULES = 1000
"""More alternatives are one expression. The parser takes 2,000."""

_OF_TREES = re.compile(r"^[ \t]*[?!]+(?=[a-z_]\w*\s*:)", re.MULTILINE)
"""Lark's marks before the name of a rule; they shape the tree of a text, not the text."""

_LITERAL = r'"(?:[^"\\\n]|\\.)*+"'
_LITERALS = re.compile(
    rf"^([a-z_]\w*)[ \t]*:\s*({_LITERAL}(?:\s*\|\s*{_LITERAL}){{{_MOST_RULES},}}+)"
    r"(?=\s*\Z|[ \t]*\n\s*(?:%|\w+\s*:))",
    re.MULTILINE,
)
"""A rule of many literals, and nothing else up to the next rule."""


def lark_of_regex(pattern: str) -> str:
    r"""A Lark grammar of the texts that `pattern` matches as a whole, in the syntax of Rust's
    `regex`. \d and \w are of ASCII, as in JSON schemas and vLLM."""
    ascii_only = re.sub(r"\\.", lambda found: _ASCII.get(found[0], found[0]), pattern, flags=re.S)
    grammar = json.loads(LLMatcher.grammar_from_regex(ascii_only))
    return str(grammar["grammars"][0]["lark_grammar"])


def lark_of_grammar(grammar: str) -> str:
    """A grammar in Lark, or in EBNF as of llama.cpp, as llguidance takes it."""
    lark = any_to_lark(_OF_TREES.sub("", grammar))
    return _LITERALS.sub(_as_expression, lark)


def _as_expression(rule: re.Match[str]) -> str:
    name = f"LITERALS_OF_{rule[1].upper()}"
    return f"{rule[1]}: {name}\n{name}: {rule[2]}"
