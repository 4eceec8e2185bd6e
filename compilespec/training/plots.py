"""Curves and bars as SVG, without a plotting library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 320, 56, 16, 56, 32
COLOURS = ("#1f6feb", "#d29922", "#2da44e", "#cf222e", "#8250df")
MAX_POINTS = 400


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A named line."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A named length."""

    name: str
    value: float
    text: str
    """Written at its end."""
    is_marked: bool = False
    """True: in the colour of faults."""


class Picture(str):
    """An SVG file's text; notebooks show the picture."""

    __slots__ = ()

    def _repr_svg_(self) -> str:
        return str(self)


def draw_bars(title: str, bars: Sequence[Bar]) -> Picture:
    """The bars below each other, the longest one as wide as there is room."""
    most = max([bar.value for bar in bars] or [0]) or 1
    height = 40 + 24 * len(bars)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="8" y="20" font-size="14">{escape(title)}</text>',
    ]
    for number, bar in enumerate(bars):
        top, length = 36 + 24 * number, bar.value / most * (WIDTH - 250)
        colour = COLOURS[3] if bar.is_marked else COLOURS[0]
        parts += [
            f'<text x="132" y="{top + 13}" text-anchor="end">{escape(bar.name)}</text>',
            f'<rect x="140" y="{top}" width="{length:.1f}" height="18" fill="{colour}"/>',
            f'<text x="{146 + length:.1f}" y="{top + 13}">{escape(bar.text)}</text>',
        ]
    return Picture("\n".join([*parts, "</svg>", ""]))


def draw(title: str, curves: Sequence[Curve], *, smooth: int = 1) -> Picture:
    """The curves over one pair of axes.

    Args:
        smooth: each point becomes the mean of this many before it; fewer points than twice this are
            left unchanged.
    """
    drawn = [
        Curve(name=c.name, points=_thin(_smooth(c.points, smooth))) for c in curves if c.points
    ]
    xs = [x for c in drawn for x, _ in c.points] or [0.0]
    ys = [y for c in drawn for _, y in c.points] or [0.0]
    low_x, high_x, low_y, high_y = min(xs), max(max(xs), min(xs) + 1), min(ys), max(ys)
    room = max(0.05 * (high_y - low_y), 1e-3)
    low_y, high_y = low_y - room, high_y + room

    def place(x: float, y: float) -> str:
        right = LEFT + (x - low_x) / (high_x - low_x) * (WIDTH - LEFT - RIGHT)
        down = HEIGHT - BOTTOM - (y - low_y) / (high_y - low_y) * (HEIGHT - TOP - BOTTOM)
        return f"{right:.1f},{down:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for step in range(5):
        value = low_y + step / 4 * (high_y - low_y)
        (_, down), (right, _) = (p.split(",") for p in (place(low_x, value), place(high_x, value)))
        parts.append(f'<path d="M{LEFT} {down}H{right}" stroke="#d0d7de"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{down}" text-anchor="end">{value:.2f}</text>')
        at = low_x + step / 4 * (high_x - low_x)
        along = place(at, low_y).split(",")[0]
        parts.append(f'<text x="{along}" y="{HEIGHT - 10}" text-anchor="middle">{at:.0f}</text>')
    for number, curve in enumerate(drawn):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(place(x, y) for x, y in curve.points)
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        )
        if len(curve.points) <= 40:
            dots = (place(x, y).split(",") for x, y in curve.points)
            parts += (f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>' for x, y in dots)
        parts.append(
            f'<text x="{LEFT + number * 180}" y="40" fill="{colour}">{escape(curve.name)}</text>'
        )
    return Picture("\n".join([*parts, "</svg>", ""]))


def _smooth(points: Sequence[tuple[float, float]], width: int) -> Sequence[tuple[float, float]]:
    if len(points) < 2 * width:
        return points
    return [
        (points[i][0], sum(y for _, y in points[i - width + 1 : i + 1]) / width)
        for i in range(width - 1, len(points))
    ]


def _thin(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    every = -(-len(points) // MAX_POINTS)
    return (*points[::every], *((points[-1],) if (len(points) - 1) % every else ()))
