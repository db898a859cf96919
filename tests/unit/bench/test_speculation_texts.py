"""The real texts of the benchmark of speculation."""

import re

import pytest

from bench.speculation_answers import ANSWERS, DOCUMENTS
from bench.speculation_texts import (
    code_edit,
    fewest_steps,
    function_edit,
    quoted_share,
    quoting,
    unwrapped,
)


@pytest.mark.parametrize("name", ANSWERS)
def test_quotations_are_in_the_documents_word_for_word(name: str) -> None:
    prompt, answer = quoting(name)
    assert prompt.startswith(unwrapped(DOCUMENTS))
    quotations = re.findall(r'"([^"]*)"', answer)
    assert quotations
    for quotation in quotations:
        assert quotation in prompt


def test_edits_change_their_files() -> None:
    for prompt, answer in (code_edit(), function_edit()):
        assert answer not in prompt
        assert len(answer) > 1000


def test_the_quoted_share_counts_tokens_within_quotation_marks() -> None:
    text = 'He said "a b" and "c".'
    spans = [found.span() for found in re.finditer(r"\S", text)]
    assert quoted_share(text, spans) == 3 / len(spans)


@pytest.mark.parametrize(
    ("answer", "most", "steps"),
    [
        ([1, 2, 3, 4], 8, 1),  # the first token is drawn with the prompt
        ([1, 2, 3, 4], 1, 2),
        ([1, 2, 8, 1, 2, 3, 8], 8, 3),  # 2 8 by the copy and a draw, then 1, then the rest
        ([9, 9, 9, 9, 9, 9], 8, 2),  # the second 9 is new, the others are a loop
        ([21, 22, 23], 8, 2),
    ],
)
def test_the_fewest_steps_of_an_answer(answer: list[int], most: int, steps: int) -> None:
    assert fewest_steps([0, 1, 2, 3, 4, 5], answer, most) == steps
