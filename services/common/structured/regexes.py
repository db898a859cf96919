"""Regular expressions, in the syntax of Rust's `regex`, as grammars of llguidance."""

import json
import re

from llguidance import LLMatcher

_ASCII = {r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[0-9A-Za-z_]", r"\W": "[^0-9A-Za-z_]"}


def lark_of_regex(pattern: str) -> str:
    r"""A Lark grammar of the texts that `pattern` matches as a whole. \d and \w are of ASCII, as in
    JSON schemas and vLLM."""
    ascii_only = re.sub(r"\\.", lambda found: _ASCII.get(found[0], found[0]), pattern, flags=re.S)
    grammar = json.loads(LLMatcher.grammar_from_regex(ascii_only))
    return str(grammar["grammars"][0]["lark_grammar"])
