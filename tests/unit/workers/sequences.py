"""Sequences without an engine, in blocks of 4."""

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from services.engine.sequences.sequence import Branch, Rules, Sequence

from .fakes import SAMPLED, ticket

SIZE = 4
KEY = "h-r1"


def sequence(tokens: Seq[int], num_blocks: int = 50, **changes: Any) -> Sequence:
    """A sequence that has computed all of its tokens but the last."""
    asked = ticket("r1", tokens, sampling=replace(SAMPLED, max_tokens=100, **changes))
    rules = Rules.of(asked, SIZE, frozenset(), 1000)
    blocks = range(num_blocks)
    return Sequence(rules, [Branch(0)], tokens, block_ids=blocks, num_computed=len(tokens) - 1)
