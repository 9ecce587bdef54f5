"""Reads workloads from public traces: Azure CSV, Mooncake JSONL, ShareGPT JSON."""

from __future__ import annotations

import csv
import json
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from tokenmill.errors import ConfigError
from tokenmill.plan.demand.workload import Workload, poisson

CHARACTERS_PER_TOKEN = 4  # of English text, where nobody counts better
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_trace(path: Path, limit: int | None = None, rate: float | None = None) -> Workload:
    """A workload from a file of any known kind; `rate` stretches its gaps (ShareGPT has none: 1/s unless given)."""
    if not path.is_file():
        raise ConfigError(f"there is no trace {path}")
    with path.open(encoding="utf-8", errors="replace") as file:
        head = file.read(4096).lstrip()
    if head.startswith("["):
        return read_sharegpt(path, limit, rate=rate or 1.0)
    if head.startswith("{"):
        found = read_mooncake(path, limit)
    elif head.split("\n", 1)[0].strip().startswith(AZURE_COLUMNS[0]):
        found = read_azure(path, limit)
    else:
        raise ConfigError(
            f"{path} is no trace that is known here: a CSV with {', '.join(AZURE_COLUMNS)}, JSON lines with timestamp, "
            "input_length and output_length, or a JSON list of conversations"
        )
    return found if rate is None else found.at_rate(rate)


def read_azure(path: Path, limit: int | None = None) -> Workload:
    """Azure's LLM inference trace: a moment, prompt tokens and generated tokens per line."""
    rows: list[tuple[float, int, int]] = []
    with path.open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(islice(csv.DictReader(file), limit), start=2):
            try:
                moment, prompt, output = (row[name] for name in AZURE_COLUMNS)
                rows.append((_moment(moment), int(prompt), int(output)))
            except (KeyError, TypeError, ValueError) as error:
                raise ConfigError(f"{path}, line {number}: {_wrong(error, ', '.join(AZURE_COLUMNS))}") from None
    return _workload(path.stem, rows)


def read_mooncake(path: Path, limit: int | None = None) -> Workload:
    """Mooncake's traces: milliseconds, lengths, and a hash per 512 tokens of the prompt and all before them."""
    rows: list[tuple[float, int, int]] = []
    hashes: list[tuple[int, ...]] = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(islice((line for line in file if line.strip()), limit), start=1):
            try:
                entry = json.loads(line)
                rows.append((entry["timestamp"] / 1000, int(entry["input_length"]), int(entry["output_length"])))
                hashes.append(tuple(entry.get("hash_ids", ())))
            except (KeyError, TypeError, ValueError) as error:
                fields = "timestamp, input_length, output_length"
                raise ConfigError(f"{path}, request {number}: {_wrong(error, fields)}") from None
    return _workload(path.stem, rows, hashes if any(hashes) else None)


def read_sharegpt(path: Path, limit: int | None = None, *, rate: float = 1.0) -> Workload:
    """The first exchange of every conversation. There are no times in it: arrivals are Poisson, from a seed."""
    try:
        conversations = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    found = [exchange for one in conversations if (exchange := _first_exchange(one)) is not None][:limit]
    prompts, outputs = tuple(_tokens(asked) for asked, _ in found), tuple(_tokens(said) for _, said in found)
    return Workload(path.stem, poisson(len(found), rate), prompts, outputs, texts=tuple(asked for asked, _ in found))


def _tokens(text: str) -> int:
    return max(1, round(len(text) / CHARACTERS_PER_TOKEN))


def _workload(name: str, rows: list[tuple[float, int, int]], hashes: list[tuple[int, ...]] | None = None) -> Workload:
    """Sorted by arrival, the first at 0. Who asked nothing or got nothing cost nothing and is left out."""
    order = sorted((at for at, row in enumerate(rows) if row[1] > 0 and row[2] > 0), key=lambda at: rows[at][0])
    first = rows[order[0]][0] if order else 0.0
    columns = [(rows[at][0] - first, *rows[at][1:]) for at in order]
    arrivals, prompts, outputs = zip(*columns) if columns else ((), (), ())
    return Workload(name, arrivals, prompts, outputs, None if hashes is None else tuple(hashes[at] for at in order))


def _wrong(error: Exception, fields: str) -> str:
    if isinstance(error, json.JSONDecodeError):
        return "this is not JSON"
    return f"there is no {error}" if isinstance(error, KeyError) else f"{fields} must be a time and two whole numbers"


def _moment(text: str) -> float:
    """Seconds of "2023-11-16 18:17:03.9799600", whose fraction has a digit more than Python reads."""
    whole, _, fraction = text.strip().partition(".")
    return datetime.fromisoformat(whole + "+00:00").timestamp() + float(f"0.{fraction or 0}")


def _first_exchange(conversation: Any) -> tuple[str, str] | None:
    turns = conversation.get("conversations") if isinstance(conversation, dict) else None
    if not isinstance(turns, list) or len(turns) < 2 or not all(isinstance(turn, dict) for turn in turns[:2]):
        return None
    first, second = (turn.get("value") for turn in turns[:2])
    speakers = [turn.get("from") for turn in turns[:2]]
    if speakers[0] not in ("human", "user") or speakers[1] not in ("gpt", "assistant", "chatgpt", "bard", "bing"):
        return None
    return (first, second) if isinstance(first, str) and isinstance(second, str) and first and second else None
