"""Real texts for `bench.speculation` in which parts of the prompt come again, and a runner that
draws them.

Random weights write no such text. `PrescribedRunner` computes each step as it is, and then has the
tokens of the text in the place of the drawn ones.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar
from unittest.mock import patch

from bench.speculation_answers import ANSWERS, DOCUMENTS
from services.engine.batch import Row, RowResult
from services.engine.forward import CompleteFlight, Flight
from services.engine.runner import Runner

ROOT = Path(__file__).resolve().parents[1]


def code_edit() -> tuple[str, str]:
    """A request to rename a class in a file, and the whole file with the new name."""
    source = (ROOT / "services/engine/scheduler.py").read_text()
    prompt = f"{source}\n\nRename ScheduledSequence to StepRow. Answer with the whole file.\n\n"
    return prompt, source.replace("ScheduledSequence", "StepRow")


def function_edit() -> tuple[str, str]:
    """A request to rename a variable in a file, and the function that changes."""
    source = (ROOT / "services/worker/drafting.py").read_text()
    found = re.search(r"def plan_draft.*?(?=\n\n\n)", source, re.DOTALL)
    assert found is not None
    prompt = f"{source}\n\nRename num_bytes to size_bytes. Answer with what changes.\n\n"
    return prompt, (
        "Only `plan_draft` has this variable. Here is the function with the new name:\n\n"
        f"```python\n{found[0].replace('num_bytes', 'size_bytes')}\n```\n\nThe message of the "
        "error still names the size and the number of blocks, so its test need not change.\n"
    )


def quoting(name: str) -> tuple[str, str]:
    """Three documents with a question, and the answer of this name (`bench.speculation_answers`),
    without the line breaks of their paragraphs."""
    question, answer = ANSWERS[name]
    return unwrapped(f"{DOCUMENTS}\n{question} Answer with quotations.\n\n"), unwrapped(answer)


def unwrapped(text: str) -> str:
    return re.sub(r"(?<!\n)\n(?!\n|$)", " ", text)


def quoted_share(answer: str, spans: Sequence[tuple[int, int]]) -> float:
    """The share of the answer's tokens that are in quotations. `spans`: of each token in the
    text."""
    quotations = [found.span(1) for found in re.finditer(r'"([^"]*)"', answer)]
    return sum(any(s <= (a + b) / 2 < e for s, e in quotations) for a, b in spans) / len(spans)


def fewest_steps(prompt: Sequence[int], answer: Sequence[int], most: int) -> int:
    """The steps of a prompt lookup that always knows where the longest continuation is which the
    text before has, if there is one behind the last token."""
    text, steps, end = [*prompt, *answer], 0, len(prompt) + 1
    while end < len(text):
        longest = 0
        for place in (i for i in range(1, end) if text[i - 1] == text[end - 1]):
            length = 0
            while length < min(most, len(text) - 1 - end):
                if text[place + length] != text[end + length]:
                    break
                length += 1
            longest = max(longest, length)
        end += longest + 1
        steps += 1
    return steps


class PrescribedRunner(Runner):
    """Draws the tokens of `text`, which begins with the prompt."""

    text: ClassVar[Sequence[int]] = ()

    def launch(
        self, rows: Sequence[Row], copies: Sequence[tuple[int, int]] = (), num_waiting: int = 0
    ) -> Flight:
        results = super().launch(rows, copies, num_waiting).result()
        return CompleteFlight([self._prescribed(*one) for one in zip(rows, results, strict=True)])

    def _prescribed(self, row: Row, result: RowResult) -> RowResult:
        if not isinstance(result, tuple):
            return result
        begin = row.start + len(row.token_ids) - row.num_drafts
        return tuple(self.text[begin : begin + len(row.draws)])


@contextmanager
def prescribed(text: Sequence[int]) -> Iterator[None]:
    """Offline deployments that start within the block decode `text`."""
    runner = type("Prescribed", (PrescribedRunner,), {"text": [*text, *[0] * 64]})
    with patch("services.offline.deployment.Runner", runner):
        yield
