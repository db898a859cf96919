"""Charts as inline SVG, without JavaScript: lines over time, and distributions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain, pairwise

_WIDTH, _HEIGHT = 560, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 10, 38
_MAX_POINTS = 800


@dataclass(frozen=True, slots=True)
class Line:
    """A named curve; `number` picks its colour."""

    name: str
    points: Sequence[tuple[float, float]]
    number: int = 1
    as_dots: bool = False


def chart(title: str, x_label: str, y_label: str, lines: Sequence[Line]) -> str:
    """A figure with axes from 0, grid and legend."""
    points = [point for line in lines for point in line.points]
    x_ticks = _ticks(max((x for x, _ in points), default=1.0))
    y_ticks = _ticks(max((y for _, y in points), default=1.0))
    scale = _Scale(x_ticks[-1], y_ticks[-1])
    parts = [_grid(scale, x_ticks, y_ticks), *(_curve(scale, line) for line in lines)]
    parts.append(_text(_LEFT + (_WIDTH - _LEFT - _RIGHT) / 2, _HEIGHT - 4, x_label, "middle"))
    legend = "".join(
        f'<span class="key c{line.number}">{escape(line.name)}</span>' for line in lines
    )
    return (
        f"<figure><figcaption>{escape(title)} <small>{escape(y_label)}</small>{legend}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg></figure>"
    )


def cumulative(name: str, values_ms: Sequence[float], number: int) -> Line:
    """The share of values up to each value, in percent."""
    ordered = sorted(values_ms)
    step = max(1, len(ordered) // _MAX_POINTS)
    ranks = [*range(0, len(ordered), step), len(ordered) - 1] if ordered else []
    return Line(name, [(ordered[i], 100 * (i + 1) / len(ordered)) for i in ranks], number)


def thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """At most about 800 of the points, for a page of bounded size; the highest are kept."""
    size = math.ceil(len(points) / _MAX_POINTS)
    groups = (points[start : start + size] for start in range(0, len(points), max(1, size)))
    return [max(group, key=lambda point: point[1]) for group in groups]


def steps(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The corners of a line on which each value stays until the next one."""
    corners = [((at, before), (at, value)) for (_, before), (at, value) in pairwise(points)]
    return [*points[:1], *chain.from_iterable(corners)]


@dataclass(frozen=True, slots=True)
class _Scale:
    x_max: float
    y_max: float

    def x(self, value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * value / self.x_max

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / self.y_max


def _ticks(highest: float) -> list[float]:
    """About five round values from 0 to at least `highest`."""
    rough = (highest if highest > 0 else 1.0) / 5
    power: float = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    return [step * number for number in range(math.ceil(highest / step - 1e-9) + 1)] or [0.0]


def _grid(scale: _Scale, x_ticks: Sequence[float], y_ticks: Sequence[float]) -> str:
    parts = []
    for value in y_ticks:
        y = scale.y(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{value:,.6g}", "end"))
    for value in x_ticks:
        parts.append(_text(scale.x(value), _HEIGHT - _BOTTOM + 16, f"{value:,.6g}", "middle"))
    return "".join(parts)


def _curve(scale: _Scale, line: Line) -> str:
    places = [(f"{scale.x(x):.1f}", f"{scale.y(y):.1f}") for x, y in line.points]
    if line.as_dots:
        dots = "".join(f'<circle cx="{x}" cy="{y}" r="2"/>' for x, y in places)
        return f'<g class="c{line.number} dots">{dots}</g>'
    path = " ".join(f"{x},{y}" for x, y in places)
    return f'<polyline class="c{line.number}" points="{path}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
