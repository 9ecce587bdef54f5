"""Draws a Chrome trace as a picture: what the host and the device did, and where the device waited."""

from __future__ import annotations

import html
import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

WIDTH, LEFT, LANE, LEAST_PIXELS = 1200, 110, 26, 0.5
LEAST_GAP = 3.0  # microseconds: shorter waits of the device are the launches themselves
NAMED_GAPS, NAMED_KINDS = 6, 12
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#ff9da7", "#9c755f", "#bab0ac")


@dataclass(frozen=True)
class Span:
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    steps: list[Span]  # calls of the engine's step on the host
    host: list[Span]  # what the host did in them, outermost calls only
    device: list[Span]  # kernels and copies; empty on a CPU

    def gaps(self) -> list[tuple[float, float]]:
        """When the device had nothing to do, longest first."""
        found: list[tuple[float, float]] = []
        until: float | None = None
        for span in self.device:
            if until is not None and span.start - until >= LEAST_GAP:
                found.append((until, span.start))
            until = max(until or 0.0, span.end)
        return sorted(found, key=lambda gap: gap[0] - gap[1])

    def cause(self, gap: tuple[float, float]) -> str:
        """What the host was doing for most of a gap."""
        shares: Counter[str] = Counter()
        for span in self.host:
            shares[span.name] += max(0.0, min(span.end, gap[1]) - max(span.start, gap[0]))  # type: ignore[assignment]
        name, share = shares.most_common(1)[0] if shares else ("", 0)
        return name if share * 2 > gap[1] - gap[0] else "host: Python between launches"


def read(trace: Path) -> Timeline:
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X"]

    def spans(*categories: str) -> list[Span]:
        found = [
            Span(_short(event["name"]), float(event["ts"]), float(event["ts"]) + float(event["dur"]))
            for event in events
            if event.get("cat") in categories
        ]
        return sorted(found, key=lambda span: (span.start, -span.end))

    steps = [span for span in spans("user_annotation") if span.name == "engine step"]
    device = spans("kernel", "gpu_memcpy", "gpu_memset")
    return Timeline(steps, _outermost(spans("cuda_runtime", "cuda_driver") if device else spans("cpu_op")), device)


def draw(timeline: Timeline, title: str) -> str:
    """The timeline as SVG: lanes for steps, host and device, the longest gaps named, and where the time went."""
    everything = [*timeline.steps, *timeline.host, *timeline.device]
    first, last = min(span.start for span in everything), max(span.end for span in everything)
    scale = (WIDTH - LEFT - 10) / max(last - first, 1e-9)
    busy = timeline.device or timeline.host
    kinds = Counter[str]()
    for span in busy:
        kinds[span.name] += span.end - span.start  # type: ignore[assignment]
    named = [name for name, _ in kinds.most_common(NAMED_KINDS)]
    colours = {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(named)}

    def x(time: float) -> float:
        return LEFT + (time - first) * scale

    parts = [_text(10, 18, title, "t")]
    for lane, (label, spans) in enumerate(
        (("engine step", timeline.steps), ("host", timeline.host), ("device", timeline.device))
    ):
        y = 34 + lane * (LANE + 8)
        parts.append(_text(10, y + 17, label))
        drawn = 0.0
        for span in spans:
            if x(span.end) < drawn + LEAST_PIXELS:
                continue  # too small to be seen
            drawn, width = x(span.end), max((span.end - span.start) * scale, LEAST_PIXELS)
            waits = "#e8edf2" if "Synchronize" in span.name else "#8fa3b8"  # the host waits, or works
            fill = colours.get(span.name, "#999999") if spans is busy else waits
            took = f"{span.name}: {span.end - span.start:.1f} us"
            parts.append(
                f'<rect x="{x(span.start):.2f}" y="{y}" width="{width:.2f}" height="{LANE}" fill="{fill}">'
                f"<title>{html.escape(took)}</title></rect>"
            )
    y = 34 + 3 * (LANE + 8) + 8
    for number, gap in enumerate(timeline.gaps()[:NAMED_GAPS], start=1):
        parts.append(
            f'<line x1="{x(gap[0]):.2f}" x2="{x(gap[1]):.2f}" y1="{y - 12}" y2="{y - 12}" stroke="#d62728" '
            f'stroke-width="4"/>' + _text(x(gap[0]), y + 2, str(number), "g")
        )
    y += 24
    for number, gap in enumerate(timeline.gaps()[:NAMED_GAPS], start=1):
        parts.append(_text(LEFT, y, f"gap {number}: {gap[1] - gap[0]:.0f} us, {timeline.cause(gap)}", "g"))
        y += 17
    total = max(span.end for span in busy) - busy[0].start
    used = total - sum(end - start for start, end in timeline.gaps()) if timeline.device else sum(kinds.values())
    y += 8
    where = "device" if timeline.device else "host"
    parts.append(
        _text(LEFT, y, f"{where}: {total:,.0f} us from first to last, busy {used:,.0f} us ({used / total:.1%})")
    )
    for name in named:
        y += 17
        count = sum(span.name == name for span in busy)
        parts.append(f'<rect x="{LEFT}" y="{y - 10}" width="10" height="10" fill="{colours[name]}"/>')
        parts.append(_text(LEFT + 18, y, f"{kinds[name]:9,.0f} us  {count:5d} x  {name}"))
    style = (
        "<style>text{font:12px ui-monospace,monospace;fill:#333}.t{font-weight:bold}.g{fill:#d62728}"
        "@media(prefers-color-scheme:dark){text{fill:#ddd}.g{fill:#ff7b72}}</style>"
    )
    body = "".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 16}">{style}{body}</svg>\n'


def _outermost(spans: Iterable[Span]) -> list[Span]:
    """Spans that lie in no other one; the input is sorted by start, longest first."""
    kept: list[Span] = []
    for span in spans:
        if not kept or span.start >= kept[-1].end:
            kept.append(span)
    return kept


def _short(name: str) -> str:
    """A kernel's name without its template arguments and parameters."""
    name = re.sub(r"^void ", "", name)
    return re.split(r"[<(]", name)[0][:70] or name[:70]


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y}" class="{kind}" xml:space="preserve">{html.escape(text)}</text>'
