"""Question patterns: `(what is|explain) paged attention` stands for two questions.

An alternative may be empty, `(please |)stop`, and groups may be nested.
"""

import re
from itertools import product

_INNERMOST_GROUP = re.compile(r"\(([^()]*)\)")


def expand(pattern: str) -> list[str]:
    """Every question the pattern stands for, in the order of its alternatives.

    Raises ValueError when the brackets of the pattern do not match.
    """
    group = _INNERMOST_GROUP.search(pattern)
    if group is None:
        if "(" in pattern or ")" in pattern:
            raise ValueError(f"unbalanced brackets in {pattern!r}")
        return [" ".join(pattern.split())]
    before, after = pattern[: group.start()], pattern[group.end() :]
    choices = (expand(before + choice + after) for choice in group.group(1).split("|"))
    return list(dict.fromkeys(question for found in choices for question in found))


def fill(stems: list[str], names: list[str]) -> list[str]:
    """Every stem, such as `what is {}`, with every name in its place."""
    return [stem.replace("{}", name) for stem, name in product(stems, names)]
