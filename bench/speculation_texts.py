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

from services.engine.batch import Row, RowResult
from services.engine.forward import CompleteFlight, Flight
from services.engine.runner import Runner

ROOT = Path(__file__).resolve().parents[1]


def code_edit() -> tuple[str, str]:
    """A request to rename a class in a file, and the whole file with the new name."""
    source = (ROOT / "services/engine/scheduler.py").read_text()
    prompt = f"{source}\n\nRename ScheduledSequence to StepRow. Answer with the whole file.\n\n"
    return prompt, source.replace("ScheduledSequence", "StepRow")


def quotations() -> tuple[str, str]:
    """A question about a page, and an answer that quotes four of its sentences."""
    page = (ROOT / "docs/concepts.md").read_text()

    def quoted(begin: str) -> str:
        found = re.search(re.escape(begin) + r".*?\.(?=\s)", page, re.DOTALL)
        assert found is not None, begin
        return found[0]

    answer = (
        "Nothing that a client has seen changes when a worker dies, for three reasons. First, the "
        f"gateway keeps what it sent. The page says: {quoted('If a worker dies, the request')} "
        f"Second, little work is lost: {quoted('The dead worker')} Third, draws do not depend on "
        f"the worker. In the words of the page: {quoted('Sampling depends on')} Blocks of a dead "
        f"worker are safe as well, because of its lock: {quoted('A worker locks a file')} A worker "
        "that hangs is fenced instead, and keeps its blocks until it dies or gives them back."
    )
    return f"{page}\n\nWhat does a client notice when a worker dies? Quote the page.\n\n", answer


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
