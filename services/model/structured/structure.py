"""The form that a generated text has, as a client asks for it."""

from dataclasses import dataclass
from enum import Enum

MAX_STRUCTURE_BYTES = 1 << 18


class StructureKind(Enum):
    """The kind of a `Structure`'s text; vLLM's `structured_outputs` has the same names."""

    JSON = "json"  # a JSON schema; empty: any JSON object
    REGEX = "regex"  # matches all of the generated text
    CHOICE = "choice"  # a JSON array of strings
    GRAMMAR = "grammar"  # Lark, or EBNF as of llama.cpp
    STRUCTURAL_TAG = "structural_tag"  # JSON; see structural_tags.py


@dataclass(frozen=True, slots=True)
class Structure:
    """A form of texts. It travels with its request; every process compiles it for itself."""

    kind: StructureKind
    text: str
