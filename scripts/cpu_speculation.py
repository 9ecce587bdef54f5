"""What drafts bring on a CPU by kind of load, with and without them in turns, by how many requests run at once.

    OMP_NUM_THREADS=1 python scripts/cpu_speculation.py --chat questions.jsonl --at 1 4 16 64

Wall times of a machine that others use say little, so steps, tokens per step and the process's CPU time are told beside
them; with one thread CPU time is the time that the work took. The file has a JSON object per line with `turns`, as
MT-Bench has them; all other loads are made of the project's own texts.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from tokenmill import LLM, SamplingParams

ROOT = Path(__file__).parents[1]
KINDS = ("chat", "copy", "edit", "quote", "json", "form")
ENDS = {"copy": ["\n"], "edit": ["```"]}  # behind the copy, or the function, the answer is over
PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 16},
        "last_name": {"type": "string", "maxLength": 16},
        "age_in_years": {"type": "integer", "minimum": 0, "maximum": 120},
        "favourite_colour": {"enum": ["red", "green", "blue", "yellow"]},
        "is_a_member": {"type": "boolean"},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 24},
                "postal_code": {"type": "string", "maxLength": 8},
                "city": {"type": "string", "maxLength": 16},
            },
            "required": ["street", "postal_code", "city"],
            "additionalProperties": False,
        },
    },
    "required": ["first_name", "last_name", "age_in_years", "favourite_colour", "is_a_member", "address"],
    "additionalProperties": False,
}  # fmt: skip


# Nothing but what a grammar mostly leaves no choice about
FORM = {
    "type": "object",
    "properties": {
        "customer_identification_number": {"type": "integer", "minimum": 0, "maximum": 99},
        "preferred_payment_method": {"enum": ["credit_card_on_file", "bank_transfer_in_advance"]},
        "shipping_address_verified": {"type": "boolean"},
        "delivery_time_window": {"enum": ["in_the_morning", "in_the_afternoon", "in_the_evening"]},
    },
    "required": [
        "customer_identification_number", "preferred_payment_method", "shipping_address_verified",
        "delivery_time_window",
    ],
    "additionalProperties": False,
}  # fmt: skip
SCHEMAS = {"json": PERSON, "form": FORM}
Prompt = str | list[dict[str, Any]]


@dataclass(frozen=True)
class Task:
    prompt: Prompt
    params: SamplingParams


@dataclass(frozen=True)
class Outcome:
    wall: float
    cpu: float
    steps: int
    answers: list[list[int]]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.answers))


def tasks(kind: str, count: int, tokens: int, chat: Path | None) -> list[Task]:
    """As many of a kind; each has its own text."""
    free = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=kind == "chat")
    if kind == "chat":
        assert chat is not None
        questions = [json.loads(line)["turns"][0] for line in chat.read_text().splitlines()]
        questions = questions[:: max(1, len(questions) // count)]
        return [Task(_asked(questions[i % len(questions)]), free) for i in range(count)]
    if kind in SCHEMAS:
        strict = SamplingParams(temperature=0.8, seed=1, max_tokens=tokens, structured={"json": SCHEMAS[kind]})
        names = random.Random(1).sample(WORDS, 40)
        return [
            Task(_asked(f"Write JSON about a person called {names[i % 40]}, number {i}."), strict) for i in range(count)
        ]
    free = replace(free, stop=ENDS.get(kind))
    makers: dict[str, Callable[[], Iterator[Prompt]]] = {"copy": _copies, "edit": _edits, "quote": _quotes}
    return [Task(prompt, free) for prompt in islice(makers[kind](), count)]


WORDS = sorted(set(re.findall(r"\b[A-Z][a-z]{3,9}\b", (ROOT / "docs/serving.md").read_text())))


def _asked(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text[:4000]}]


def _paragraphs() -> list[str]:
    files = [ROOT / "LICENSE", *sorted((ROOT / "docs").glob("*.md"))]
    found = [" ".join(one.split()) for file in files for one in file.read_text().split("\n\n")]
    plain = [one for one in found if 350 < len(one) < 700 and one[0].isalpha() and "|" not in one and "`" not in one]
    return random.Random(0).sample(plain, len(plain))


def _copies() -> Iterator[str]:
    """A text, and the same again: one that was copied shows how."""
    first, *texts = _paragraphs()
    for text in cycle(texts):
        yield f"Text: {first}\n\nThe same text again: {first}\n\nText: {text}\n\nThe same text again:"


def _functions() -> list[tuple[str, str, str]]:
    """Functions of the project, each with one of its arguments and another name for it."""
    found = []
    for file in sorted((ROOT / "tokenmill").rglob("*.py")):
        text = file.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.col_offset == 0 and 8 <= node.end_lineno - node.lineno <= 20:
                source = ast.get_source_segment(text, node) or ""
                names = [one.arg for one in node.args.args if len(one.arg) > 3]
                if names and len(source) < 900:
                    found.append((source, names[0], f"new_{names[0]}"))
    return random.Random(0).sample(found, len(found))


def _renamed(source: str, old: str, new: str) -> str:
    return re.sub(rf"\b{old}\b", new, source)


def _edits() -> Iterator[str]:
    """A function, and the same with an argument renamed: one that was edited shows how."""
    first, *functions = _functions()
    example = f"{_edit(*first)}{_renamed(*first)}\n```\n\n"
    for one in cycle(functions):
        yield example + _edit(*one)


def _edit(source: str, old: str, new: str) -> str:
    return f"```python\n{source}\n```\n\nThe same function with `{old}` renamed to `{new}`:\n\n```python\n"


def _quotes() -> Iterator[list[dict[str, Any]]]:
    texts = _paragraphs()
    for text, other in zip(cycle(texts), cycle(texts[1:])):
        yield _asked(
            "Summarize this text by quoting its three most important sentences word for word, in quotation marks."
            f"\n\n{text} {other}"
        )


class Bench:
    def __init__(self, llm: LLM) -> None:
        self._llm, self._engine = llm, llm._built.engine
        assert self._engine.speculation is not None
        self.speculation = self._engine.speculation

    def run(self, some: list[Task], at: int, on: bool) -> Outcome:
        self._engine.speculation = self.speculation if on else None
        self._engine.scheduler.drafting = False
        if self._engine.grammars is not None:
            self._engine.grammars.looks_ahead = on
        self._llm.reset_prefix_cache()  # what drafts learned of answers, too
        steps, answers = self._engine.scheduler.stats.steps, []
        wall, cpu = time.perf_counter(), time.process_time()
        for first in range(0, len(some), at):
            answers += self._answers(some[first : first + at])
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        return Outcome(wall, cpu, self._engine.scheduler.stats.steps - steps, answers)

    def _answers(self, some: list[Task]) -> list[list[int]]:
        params = [one.params for one in some]
        if isinstance(some[0].prompt, str):
            outputs = self._llm.generate([one.prompt for one in some], params, use_tqdm=False)
        else:
            outputs = self._llm.chat([one.prompt for one in some], params, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in outputs]


def compare(bench: Bench, kind: str, some: list[Task], at: int, turns: int) -> None:
    bench.run(some[:at], at, True)
    bench.run(some[:at], at, False)
    walls, cpus, pairs = [], [], []
    stats = bench.speculation.stats
    before = {name: (one.accepted, one.drafted) for name, one in stats.items()}
    for turn in range(turns):
        found = {on: bench.run(some, at, on) for on in ((False, True) if turn % 2 else (True, False))}
        plain, drafted = found[False], found[True]
        walls.append(plain.wall / drafted.wall)
        cpus.append(plain.cpu / drafted.cpu)
        pairs.append((plain, drafted))
    plain, drafted = pairs[-1]
    same = sum(one == other for one, other in zip(plain.answers, drafted.answers, strict=True))
    gained = {name: (one.accepted - before[name][0], one.drafted - before[name][1]) for name, one in stats.items()}
    told = "; ".join(f"{name} {held} of {tried}" for name, (held, tried) in gained.items() if tried)
    print(
        f"{kind:5} {at:3d} at once: wall x {statistics.median(walls):.2f} ({min(walls):.2f} to {max(walls):.2f}), "
        f"CPU x {statistics.median(cpus):.2f} ({min(cpus):.2f} to {max(cpus):.2f}), "
        f"steps {plain.steps} and {drafted.steps}: x {plain.steps / drafted.steps:.2f}; "
        f"the same answer {same} of {len(some)}, {drafted.tokens} tokens; held: {told or 'none tried'}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chat", type=Path, help="questions; without them that load is left out")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--model", default="default")
    parser.add_argument("--speculation", help="as the setting; default: what the engine chooses")
    parser.add_argument("--at", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--tokens", type=int, default=128, help="of an answer, at most")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--least", type=int, default=8, help="requests of a turn")
    arguments = parser.parse_args()
    bench = Bench(LLM(model=arguments.model, speculation=arguments.speculation, max_model_len=2048))
    for kind in arguments.kinds:
        if kind == "chat" and arguments.chat is None:
            continue
        for at in arguments.at:
            some = tasks(kind, max(arguments.least, at), arguments.tokens, arguments.chat)
            compare(bench, kind, some, at, arguments.turns)


if __name__ == "__main__":
    main()
