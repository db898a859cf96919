"""A line chart as SVG."""

from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT, _LEFT, _TOP, _LEGEND = 520, 300, 50, 40, 20
_COLOURS = ("#4c9f70", "#5f6caf", "#c8553d", "#e8b44c", "#8d99ae")


def lines(title: str, curves: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """One line for each curve of (x, y), from 0 on both axes, on the same scale."""
    most = max(x for points in curves.values() for x, _ in points)
    height = _TOP + _HEIGHT + 40 + _LEGEND * len(curves)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 20}" height="{height}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-weight="bold">{escape(title)}</text>',
    ]
    for step in range(6):
        value = most * step / 5
        x, y = _at(value, value, most)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_LEFT + _WIDTH}" stroke="#dddddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.0f}</text>')
        below = _TOP + _HEIGHT + 16
        parts.append(f'<text x="{x:.1f}" y="{below}" text-anchor="middle">{value:.0f}</text>')
    for number, (name, points) in enumerate(curves.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (_at(*point, most) for point in points))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = _TOP + _HEIGHT + 40 + _LEGEND * number
        parts.append(f'<rect x="{_LEFT}" y="{y - 10}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{_LEFT + 18}" y="{y}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _at(x: float, y: float, most: float) -> tuple[float, float]:
    return _LEFT + _WIDTH * x / most, _TOP + _HEIGHT * (1 - y / most)
