"""What `tokenmill bench cpu` prints and writes: the table with medians and spread, the machine, and the JSON."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tokenmill.bench.cpu import SINGLES, Column, ContenderFigures, Setup
from tokenmill.bench.peers import OURS

# What of a CPU's features decides how fast small models run; the names are Linux's.
FEATURES = (
    *("avx2", "f16c", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "amx_bf16"),
    *("asimd", "asimddp", "i8mm", "bf16", "sve", "sve2"),  # of ARM CPUs
)


def table(columns: list[Column], rows: list[ContenderFigures]) -> list[str]:
    """A Markdown table: medians with their spread, then our median over the best peer's."""
    lines = ["| engine, weights | " + " | ".join(column.title for column in columns) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for row in rows:
        lines.append(f"| {row.title} | " + " | ".join(_cell(row, column) for column in columns) + " |")
    ratios = [_ratio(rows, column) for column in columns]
    if any(ratio != "-" for ratio in ratios):
        lines.append("| tokenmill / best peer | " + " | ".join(ratios) + " |")
    return lines


def legend(rounds: int) -> str:
    return (
        f"cells: median (lowest-highest) over {rounds} round{'s' if rounds > 1 else ''}; prefill and decode are of "
        f"{SINGLES} single requests per round"
    )


def notes(rows: list[ContenderFigures]) -> list[str]:
    """Versions, failures, and how far each first answer agrees with ours."""
    ours = next((row.tokens for row in rows if row.contender.name == OURS), [])
    lines = []
    for row in rows:
        said = [row.version] if row.version else []
        if row.tokens and ours and row.contender.name != OURS:
            said.append(f"first {_common(ours, row.tokens)} of {len(ours)} tokens as ours")
        if row.failure:
            said.append(row.failure)
        lines.append(f"{row.title}: {'; '.join(said)}")
    return lines


def machine() -> dict[str, Any]:
    """The CPU as the system describes it, and how busy it is."""
    name, flags = platform.processor() or platform.machine(), ""
    described = Path("/proc/cpuinfo")
    if described.exists():
        lines = [line.partition(":") for line in described.read_text().splitlines()]
        entries = {key.strip(): value.strip() for key, _, value in lines}
        name, flags = entries.get("model name", name), entries.get("flags") or entries.get("Features", "")
    return {
        "cpu": name,
        "cores": os.cpu_count(),
        "features": [feature for feature in FEATURES if feature in flags.split()],
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def as_json(setup: Setup, rows: list[ContenderFigures], before: dict[str, Any]) -> dict[str, Any]:
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(setup).items()}
    best = {column.key: _ratio(rows, column) for column in setup.columns + setup.cpu_columns}
    figures = [row.as_dict() for row in rows]
    return {"machine": before, "setup": settings, "rows": figures, "tokenmill / best peer": best}


def _cell(row: ContenderFigures, column: Column) -> str:
    middle = row.median(column)
    if middle is None:
        return "-"
    figures = row.figures[column.key]
    return f"{_short(middle)} ({_short(min(figures))}-{_short(max(figures))})" if len(figures) > 1 else _short(middle)


def _ratio(rows: list[ContenderFigures], column: Column) -> str:
    """Ours over the best peer's, and who that is; where less is better, so is a smaller ratio."""
    medians = {row.contender: row.median(column) for row in rows}
    ours = [value for one, value in medians.items() if one.name == OURS and value is not None]
    peers = [(value, one.label) for one, value in medians.items() if one.name != OURS and value is not None]
    if not ours or not peers:
        return "-"
    choose = max if column.more_is_better else min
    best, label = choose(peers)
    return f"{choose(ours) / best:.2f}x {label}"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _common(one: list[int], other: list[int]) -> int:
    return next((place for place, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
