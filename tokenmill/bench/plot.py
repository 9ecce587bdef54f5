"""Line charts as SVG text, without a drawing library: readable on light and on dark pages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from itertools import pairwise

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 190, 44, 48  # the right margin holds the names of the lines
MARKED = 16  # points, as many as can be marked and named one by one
# Told apart by everybody, on white and on black (Okabe and Ito's, without their black and yellow).
COLORS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f7f7f", "#8c6bb1", "#66a61e", "#b15928")
# A chart that a page embeds as an image does not inherit the page's colours: it asks for the reader's preference.
STYLE = """text{font:12px system-ui,sans-serif;fill:#333}.title{font-size:14px;font-weight:600}
.grid{stroke:#8884;stroke-width:1}@media(prefers-color-scheme:dark){text{fill:#ddd}}"""


@dataclass(frozen=True)
class Series:
    name: str
    points: list[tuple[float, float]]


def chart(title: str, below: str, lines: list[Series], *, logarithmic: bool = False) -> str:
    """An SVG document: `lines` over an x axis named `below`, which may be logarithmic; y starts at 0."""
    xs = sorted({x for line in lines for x, _ in line.points}) or [1.0]
    step = _step(max((y for line in lines for _, y in line.points), default=1.0) or 1.0)
    top = step * math.ceil(max((y for line in lines for _, y in line.points), default=1.0) / step) or step
    scale = math.log if logarithmic else float
    span = (scale(xs[-1]) - scale(xs[0])) or 1.0

    def across(x: float) -> float:
        return LEFT + (scale(x) - scale(xs[0])) / span * (WIDTH - LEFT - RIGHT)

    def up(y: float) -> float:
        return HEIGHT - BOTTOM - y / top * (HEIGHT - TOP - BOTTOM)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        f'<text class="title" x="{LEFT}" y="22">{escape(title)}</text>',
        svg_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, below, "middle"),
    ]
    for tick in range(round(top / step) + 1):
        y = up(tick * step)
        out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(svg_text(LEFT - 8, y + 4, f"{tick * step:g}", "end"))
    out += [svg_text(across(x), HEIGHT - BOTTOM + 18, f"{x:g}", "middle") for x in _below(xs, logarithmic)]
    places = _apart([up(line.points[-1][1]) if line.points else up(0) for line in lines])
    for index, (line, place) in enumerate(zip(lines, places)):
        color = COLORS[index % len(COLORS)]
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in line.points)
        out.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        marked = line.points if len(line.points) <= MARKED else []
        out += [f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="3" fill="{color}"/>' for x, y in marked]
        out.append(f'<circle cx="{WIDTH - RIGHT + 14}" cy="{place:.1f}" r="4" fill="{color}"/>')
        out.append(svg_text(WIDTH - RIGHT + 24, place + 4, line.name, "start"))
    return "\n".join([*out, "</svg>", ""])


def svg_text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _below(xs: list[float], logarithmic: bool) -> list[float]:
    """Where the x axis has numbers: at every x, or at round places where there are many."""
    if len(xs) <= MARKED:
        return xs
    if not logarithmic:
        step = _step(xs[-1])
        return [tick * step for tick in range(math.ceil(xs[0] / step), math.floor(xs[-1] / step) + 1)]
    return log_ticks(xs[0], xs[-1])


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers between these two, on a logarithmic axis."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if len(powers) <= 4 else (1,)
    return [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high]


def _step(top: float) -> float:
    """A round distance between grid lines, such that there are four to ten of them."""
    power: float = 10 ** math.floor(math.log10(top))
    return next(step * power for step in (0.1, 0.2, 0.25, 0.5, 1.0) if top <= 10 * step * power)


def _apart(places: list[float], least: float = 16.0) -> list[float]:
    """Move the names of lines that end close together until none covers another, keeping their order."""
    order = sorted(range(len(places)), key=lambda index: places[index])
    moved = list(places)
    for before, after in pairwise(order):
        moved[after] = max(moved[after], moved[before] + least)
    for number, index in enumerate(reversed(order)):  # the lowest may have left the chart: push back from there
        moved[index] = min(moved[index], HEIGHT - BOTTOM - number * least)
    return moved
