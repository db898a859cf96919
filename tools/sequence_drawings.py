"""A hook of the documentation site (`mkdocs.yml`): draws the sequence diagrams of the pages, which
are written in Mermaid's language, as SVG.

Mermaid itself is a script from another host; the site has to work without a network. GitHub draws
the same blocks with Mermaid. Only the statements below are known; others are errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from textwrap import wrap
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from pymdownx.superfences import SuperFencesException  # type: ignore[import-untyped]

_COLUMN, _LINE, _GAP, _CHAR = 160, 16, 12, 6.6
"""Between participants; the height of a line of text; around a row; the width of a character."""
_PARTICIPANT = re.compile(r"participant (\w+) as (.+)")
_NOTE = re.compile(r"Note over (\w+)(?:,(\w+))?: (.+)")
_MESSAGE = re.compile(r"(\w+)(--?)(>>|x)(\w+): (.+)")
_LOOP = re.compile(r"loop (.+)")

_STYLE = (
    ".sequence{overflow-x:auto}.sequence svg{min-width:640px;width:100%}"
    ".sequence text{font-size:12px;fill:currentColor;text-anchor:middle}"
    ".sequence text{paint-order:stroke;stroke:var(--md-default-bg-color);stroke-width:4px}"
    ".sequence rect{fill:var(--md-code-bg-color);stroke:currentColor;stroke-opacity:.4}"
    ".sequence rect+text{stroke:none}.sequence rect.loop{fill:none;stroke-dasharray:3 3}"
    ".sequence path{fill:none;stroke:currentColor}.sequence path.life{stroke-opacity:.25}"
    ".sequence path.answer{stroke-dasharray:5 4}"
)


def on_config(config: MkDocsConfig) -> None:
    fence = {"name": "mermaid", "class": "sequence", "format": sequence_html}
    config.mdx_configs.setdefault("pymdownx.superfences", {})["custom_fences"] = [fence]


def sequence_html(source: str, *_: object, **_options: Any) -> str:
    """The drawing of a sequence diagram. SuperFencesException, which ends the build: it has a
    statement or a participant that is not known."""
    drawing = _Drawing()
    for line in source.strip().splitlines():
        drawing.add(line.strip())
    return f'<div class="sequence"><style>{_STYLE}</style>{drawing.svg()}</div>'


class _Drawing:
    def __init__(self) -> None:
        self._columns: dict[str, float] = {}
        self._labels: list[str] = []
        self._shapes: list[str] = []
        self._loops: list[tuple[float, str]] = []
        self._y = 3.0 * _LINE + _GAP

    def add(self, line: str) -> None:
        if line == "sequenceDiagram":
            return
        if line == "end":
            self._end_loop()
        elif found := _PARTICIPANT.fullmatch(line):
            self._columns[found[1]] = (len(self._columns) + 0.5) * _COLUMN
            self._labels.append(found[2])
        elif found := _NOTE.fullmatch(line):
            self._note(self._column(found[1]), self._column(found[2] or found[1]), found[3])
        elif found := _MESSAGE.fullmatch(line):
            begin, end = self._column(found[1]), self._column(found[4])
            self._message(begin, end, found[5], is_answer=found[2] == "--", is_lost=found[3] == "x")
        elif found := _LOOP.fullmatch(line):
            self._loops.append((self._y, found[1]))
            self._y += _LINE + _GAP
        else:
            raise SuperFencesException(f"a sequence diagram has no statement {line!r}")

    def svg(self) -> str:
        width, height = len(self._columns) * _COLUMN, self._y + _GAP
        shapes: list[str] = []
        for x, label in zip(self._columns.values(), self._labels, strict=True):
            shapes.append(f'<path class="life" d="M{x} 0V{height}"/>')
            shapes += self._box(x, x, 0, wrap(label, int((_COLUMN - 30) / _CHAR)))
        shapes += self._shapes
        size = f'viewBox="0 0 {width} {height:g}" style="max-width:{width}px"'
        return f"<svg {size}>{''.join(shapes)}</svg>"

    def _column(self, participant: str) -> float:
        if participant not in self._columns:
            raise SuperFencesException(f"a sequence diagram has no participant {participant!r}")
        return self._columns[participant]

    def _note(self, left: float, right: float, text: str) -> None:
        lines = wrap(text, int((right - left + _COLUMN - 30) / _CHAR))
        self._shapes += self._box(left, right, self._y, lines)
        self._y += len(lines) * _LINE + 2 * _GAP

    def _message(
        self, begin: float, end: float, text: str, *, is_answer: bool, is_lost: bool
    ) -> None:
        lines = wrap(text, int((abs(end - begin) - 16) / _CHAR))
        self._shapes += _text((begin + end) / 2, self._y, lines)
        self._y += len(lines) * _LINE + 4
        back = -8 if end > begin else 8
        tip = f"m{back} -5l{-back} 5l{back} 5"
        if is_lost:
            tip = "m-5 -5l10 10m0 -10l-10 10"
        kind = ' class="answer"' if is_answer else ""
        self._shapes.append(f'<path{kind} d="M{begin} {self._y:g}H{end}"/>')
        self._shapes.append(f'<path d="M{end} {self._y:g}{tip}"/>')
        self._y += _GAP

    def _end_loop(self) -> None:
        begin, text = self._loops.pop()
        width = len(self._columns) * _COLUMN - 8
        size = f'y="{begin:g}" width="{width}" height="{self._y - begin:g}"'
        self._shapes.append(f'<rect class="loop" x="4" {size} rx="4"/>')
        self._shapes += _text(4 + len(text) * _CHAR / 2 + _GAP, begin, [text])
        self._y += _GAP

    def _box(self, left: float, right: float, y: float, lines: list[str]) -> Iterator[str]:
        size = f'width="{right - left + _COLUMN - 20}" height="{len(lines) * _LINE + _GAP}"'
        yield f'<rect x="{left - _COLUMN / 2 + 10}" y="{y + 1:g}" {size} rx="4"/>'
        yield from _text((left + right) / 2, y + _GAP / 2, lines)


def _text(x: float, y: float, lines: list[str]) -> Iterator[str]:
    spans = "".join(
        f'<tspan x="{x:g}" y="{y + number * _LINE - 3:g}">{escape(line)}</tspan>'
        for number, line in enumerate(lines, 1)
    )
    yield f"<text>{spans}</text>"
