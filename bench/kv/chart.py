"""Stacked bars in percent, as SVG."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

_BAR, _GAP, _HEIGHT, _LEFT, _TOP, _BELOW = 56, 24, 240, 48, 64, 40
_COLOURS = ("#4c9f70", "#e8b44c", "#c8553d", "#8d99ae", "#5f6caf")


@dataclass(frozen=True, slots=True)
class Bar:
    """`parts`: shares of 1, from below; the same names in every bar of a chart."""

    name: str
    parts: Mapping[str, float]


def stacked(title: str, bars: Sequence[Bar]) -> str:
    """A stacked chart; the space above the parts stays white."""
    names = list(dict.fromkeys(name for bar in bars for name in bar.parts))
    colours = dict(zip(names, _COLOURS, strict=False))
    width = _LEFT + len(bars) * (_BAR + _GAP) + _GAP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" '
        f'height="{_TOP + _HEIGHT + _BELOW}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(_LEFT, 18, title, "start", weight="bold"),
    ]
    left = _LEFT
    for name in names:
        lines.append(f'<rect x="{left}" y="32" width="12" height="12" fill="{colours[name]}"/>')
        lines.append(_text(left + 17, 42, name, "start"))
        left += 36 + 7 * len(name)
    for percent in range(0, 101, 20):
        y = _y(percent / 100)
        lines.append(f'<path d="M{_LEFT} {y:.1f}H{width - _GAP}" stroke="#dddddd"/>')
        lines.append(_text(_LEFT - 6, y + 4, f"{percent} %", "end"))
    for number, bar in enumerate(bars):
        lines += _bar(bar, _LEFT + _GAP + number * (_BAR + _GAP), colours)
    return "\n".join([*lines, "</svg>", ""])


def _bar(bar: Bar, x: int, colours: Mapping[str, str]) -> list[str]:
    lines, below = [], 0.0
    for name, share in bar.parts.items():
        top, bottom = _y(below + share), _y(below)
        lines.append(
            f'<rect x="{x}" y="{top:.1f}" width="{_BAR}" height="{bottom - top:.1f}" '
            f'fill="{colours[name]}"/>'
        )
        if bottom - top > 14:
            middle = (top + bottom) / 2 + 4
            lines.append(_text(x + _BAR / 2, middle, f"{100 * share:.1f}", "middle", "white"))
        below += share
    for row, word in enumerate(bar.name.split("\n")):
        lines.append(_text(x + _BAR / 2, _TOP + _HEIGHT + 16 + 14 * row, word, "middle"))
    return lines


def _y(share: float) -> float:
    return _TOP + _HEIGHT * (1 - share)


def _text(
    x: float, y: float, text: str, anchor: str, fill: str = "black", weight: str = "normal"
) -> str:
    return (
        f'<text x="{x:g}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )
