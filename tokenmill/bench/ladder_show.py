"""What the ladder shows: a table for a terminal or a page, a waterfall as SVG, and one page that holds all of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from tokenmill.bench.ladder_run import RungResult
from tokenmill.bench.plot import COLORS, STYLE, log_ticks, svg_text

WIDTH, LINE, TOP, BOTTOM = 860, 30, 52, 40
LEFT, RIGHT = 220, 180  # names of the rungs; figures
GAIN, LOSS = COLORS[2], COLORS[0]

HEADS = (
    "tok/s", "x below", "x bottom", "TTFT mean", "p99 s", "ITL p99 ms", "E2E mean", "p99 s", "KV MB", "waste", "MB",
    "ran", "answers",
)  # fmt: skip


def cells(rows: Sequence[RungResult]) -> Iterator[tuple[str, list[str]]]:
    """A name and the figures of each rung; ~ marks those of fewer requests."""
    good = [row for row in rows if row.error is None]
    below = good[0] if good else None
    for number, row in enumerate(rows, 1):
        name = f"{number}. {row.rung.title}"
        if row.error is not None or below is None:
            yield name, ["-"] * len(HEADS)
            continue
        mark = "" if row.whole else "~"
        yield (
            name,
            [
                mark + _short(row.tokens_per_second),
                _times(row.tokens_per_second / below.tokens_per_second) if row is not good[0] else "",
                _times(row.tokens_per_second / good[0].tokens_per_second) if row is not good[0] else "",
                *(mark + _short(row.ttft[kind] or 0.0) for kind in ("mean", "p99")),
                _short(1e3 * (row.itl["p99"] or 0.0)),
                *(mark + _short(row.e2e[kind] or 0.0) for kind in ("mean", "p99")),
                _short(row.kv["bytes"] / 1e6),
                f"{row.kv['waste']:.0%}",
                _short((row.memory["device"] or row.memory["peak"]) / 1e6),
                f"{row.ran}/{row.asked}",
                row.exactness.text,
            ],
        )
        below = row


def lines(rows: Sequence[RungResult]) -> Iterator[str]:
    """For a terminal, and as it is for a Markdown page."""
    table = [("rung", list(HEADS)), *cells(rows)]
    widths = [max(len(name) for name, _ in table)]
    widths += [max(len(row[column]) for _, row in table) for column in range(len(HEADS))]
    for number, (name, row) in enumerate(table):
        aligned = [name.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row, widths[1:]))]
        yield "| " + " | ".join(aligned) + " |"
        if number == 0:
            yield "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    yield from notes(rows)


def notes(rows: Sequence[RungResult]) -> Iterator[str]:
    """What the table cannot say."""
    for row in rows:
        if row.error is not None:
            yield f"{row.rung.title}: not measured: {row.error}"
    cut = [row for row in rows if not row.whole and row.error is None]
    if cut:
        yield (
            "~ no further request was begun when the time was over ("
            + ", ".join(f"{row.rung.title}: {row.ran} of {row.asked}" for row in cut)
            + "). Tokens per second are over those that ran"
            + ("; TTFT and E2E of one at a time are scaled to all." if any(row.single for row in cut) else ".")
        )
    uneven = [row for row in rows if row.exactness.first is not None]
    for row in uneven:
        counts = row.exactness
        yield (
            f"{row.rung.title}: {counts.compared - counts.equal} of {counts.compared} answers leave the bottom's, the "
            f"earliest at token {counts.first}; where they part, the bottom's token was likelier by {counts.worst:.2g} "
            "at most (in log-probability)."
        )


def waterfall(title: str, rows: Sequence[RungResult]) -> str:
    """An SVG document: a bar per rung on a logarithmic axis of tokens per second, from the rung below to this one."""
    good = [row for row in rows if row.error is None]
    speeds = [row.tokens_per_second for row in good] or [1.0]
    low, high = math.floor(math.log10(min(speeds)) * 2) / 2 - 0.25, math.log10(max(speeds)) + 0.05
    height = TOP + LINE * len(good) + BOTTOM

    def across(speed: float) -> float:
        return LEFT + (math.log10(speed) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">',
        f"<title>{escape(title)}</title><style>{STYLE}.gone{{stroke:#8888;stroke-dasharray:2 3}}</style>",
        f'<text class="title" x="16" y="22">{escape(title)}</text>',
        svg_text((LEFT + WIDTH - RIGHT) / 2, height - 8, "output tokens per second (logarithmic)", "middle"),
    ]
    for tick in log_ticks(10**low, 10**high):
        x = across(tick)
        out.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{height - BOTTOM}"/>')
        out.append(svg_text(x, height - BOTTOM + 16, f"{tick:g}", "middle"))
    before: float | None = None
    for number, row in enumerate(good):
        y, speed = TOP + LINE * number, row.tokens_per_second
        start, end = across(before) if before else LEFT, across(speed)
        color = GAIN if before is None or speed >= before else LOSS
        left, wide = min(start, end), max(abs(end - start), 1.5)
        out.append(svg_text(LEFT - 10, y + 15, row.rung.title, "end"))
        out.append(f'<rect x="{left:.1f}" y="{y + 2}" width="{wide:.1f}" height="{LINE - 10}" rx="2" fill="{color}"/>')
        if number + 1 < len(good):
            out.append(f'<line class="gone" x1="{end:.1f}" x2="{end:.1f}" y1="{y + LINE - 8}" y2="{y + LINE + 2}"/>')
        mark = "" if row.whole else "~"
        factor = "" if before is None else f"  {_times(speed / before)}"
        total = f"  ({_times(speed / speeds[0])})" if number > 1 else ""
        out.append(svg_text(max(start, end) + 8, y + 15, f"{mark}{_short(speed)}{factor}{total}", "start"))
        before = speed
    return "\n".join([*out, "</svg>", ""])


def page(title: str, told: Sequence[str], rows: Sequence[RungResult], settings: Sequence[dict[str, Any]]) -> str:
    """One HTML document that needs nothing else."""
    head = "".join(f"<th>{escape(one)}</th>" for one in ("rung", *HEADS))
    body = "".join(
        f"<tr><th>{escape(name)}</th>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
        for name, row in cells(rows)
    )
    lines_of_settings = ["\n".join(f"{name} = {value!r}" for name, value in one.items()) for one in settings]
    steps = "".join(
        f"<li><b>{escape(row.rung.title)}</b> ({row.rung.claim}). {escape(row.rung.told)}"
        f"<details><summary>settings</summary><pre>{escape(options)}</pre></details></li>"
        for row, options in zip(rows, lines_of_settings, strict=True)
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{escape(title)}</title><style>
:root{{color-scheme:light dark}}
body{{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2rem auto;padding:0 1rem}}
div{{overflow-x:auto}}table{{border-collapse:collapse;font-size:13px}}
th,td{{padding:.3rem .6rem;border-bottom:1px solid #8884;text-align:right;white-space:nowrap}}
tr>:first-child{{text-align:left;font-weight:normal}}li{{margin:.5rem 0}}
pre{{font-size:12px}}summary{{cursor:pointer;opacity:.7}}</style></head><body>
<h1>{escape(title)}</h1>{"".join(f"<p>{escape(one)}</p>" for one in told)}
<div>{waterfall(title, rows)}</div>
<div><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>
{"".join(f"<p>{escape(one)}</p>" for one in notes(rows))}
<h2>The rungs</h2><ol>{steps}</ol></body></html>
"""


def _short(value: float) -> str:
    """Three digits, and no exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.{1 if value >= 10 else 2 if value >= 1 else 3}f}"


def _times(factor: float) -> str:
    return f"x{factor:.2f}" if factor < 10 else f"x{_short(factor)}"
