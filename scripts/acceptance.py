"""How many of a head's drafts hold on real prompts, by category: greedy, at temperature 1, and of greedy drafts there.

    python scripts/acceptance.py questions.jsonl --model default --speculation head:FILE --part odd

The file has a JSON object per line with `turns` and `category`, as Spec-Bench and MT-Bench have them. The engine runs
as it does for anyone, but for its judgement: 4 drafts are verified in every step, whether they pay or not. Answers end
where they end. Only tokens are counted, so a busy machine changes nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch

from tokenmill import LLM, SamplingParams
from tokenmill.engine.speculation import head as head_module
from tokenmill.engine.speculation import speculation as speculation_module
from tokenmill.engine.speculation.device_budget import DeviceBudget
from tokenmill.engine.speculation.head_runner import DraftingHead
from tokenmill.engine.speculation.payoff import Payoff

DRAFTS = 4  # verified in every step
KV_BYTES = 2 << 30
MOST_CHARACTERS = 4000  # of a question
WAYS = ("greedy", "sampled", "sampled, greedy drafts")


@dataclass
class Counts:
    steps: int = 0  # rows of steps that verified drafts
    held: int = 0
    full: int = 0  # drafts verified

    def line(self) -> str:
        return f"{self.held / max(1, self.steps):5.2f} of {self.full / max(1, self.steps):.2f} drafts held per step"


@contextmanager
def always(drafts: int, with_noise: bool) -> Iterator[None]:
    """The engine's judgement off: every row verifies so many drafts in every step."""

    def picked(head: DraftingHead, logits: torch.Tensor, *_: object) -> torch.Tensor:
        return head.ids[logits.argmax(-1)]

    with (
        mock.patch.object(speculation_module, "admit", lambda chances, *_: [min(drafts, len(one)) for one in chances]),
        mock.patch.object(head_module, "LEAST", 0.0),
        mock.patch.object(Payoff, "on", lambda *_: True),
        mock.patch.object(DeviceBudget, "rests", lambda *_: False),
        mock.patch.object(DeviceBudget, "turn", lambda budget, rows, most, *_: min(drafts, most // rows - 1)),
        mock.patch.object(DraftingHead, "choose", DraftingHead.choose if with_noise else picked),
    ):
        yield


def chosen(path: Path, part: str, each: int) -> dict[str, list[str]]:
    """Questions by category, so many of each; categories of MT-Bench, which has few of each, are one."""
    found: dict[str, list[str]] = {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    few = {one for one in {line["category"] for line in lines} if sum(line["category"] == one for line in lines) <= 10}
    for index, line in enumerate(lines):
        if part == "all" or index % 2 == (part == "odd"):
            name = "chat" if line["category"] in few else line["category"]
            found.setdefault(name, []).append(line["turns"][0][:MOST_CHARACTERS])
    return {name: questions[:: max(1, len(questions) // each)][:each] for name, questions in found.items()}


def measure(arguments: argparse.Namespace, speculation: str, way: str, questions: dict[str, list[str]]) -> Counts:
    temperature = 0.0 if way == "greedy" else 1.0
    with always(DRAFTS, with_noise="greedy drafts" not in way):
        at = arguments.at
        options = {"max_num_seqs": at * (1 + DRAFTS), "max_model_len": 2048, "kv_cache_memory": KV_BYTES}
        with LLM(arguments.model, speculation=speculation, device=arguments.device, **options) as llm:
            engine = llm._built.engine
            drafts = engine.speculation
            assert drafts is not None
            for future in drafts.coming:
                future.result()
            total, parts = Counts(), []
            for category, texts in questions.items():
                before = [(one.steps, one.accepted, one.drafted) for one in drafts.stats.values()]
                for first in range(0, len(texts), at):
                    chats = [[{"role": "user", "content": text}] for text in texts[first : first + at]]
                    params = [
                        SamplingParams(temperature=temperature, max_tokens=arguments.tokens, seed=first + index)
                        for index in range(len(chats))
                    ]
                    llm.chat(chats, params, use_tqdm=False)
                after = [(one.steps, one.accepted, one.drafted) for one in drafts.stats.values()]
                one = Counts(*(sum(new) - sum(old) for new, old in zip(zip(*after), zip(*before), strict=True)))
                parts.append(f"{category} {one.held / max(1, one.steps):.2f}")
                total = Counts(total.steps + one.steps, total.held + one.held, total.full + one.full)
    print(f"  {way:23} {total.line()} ({total.steps} steps): {', '.join(parts)}", flush=True)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", type=Path)
    parser.add_argument("--model", default="default")
    parser.add_argument("--speculation", nargs="+", default=["on"], help="each is measured: head:FILE")
    parser.add_argument("--part", choices=("even", "odd", "all"), default="all", help="of the questions")
    parser.add_argument("--each", type=int, default=8, help="questions of a category")
    parser.add_argument("--tokens", type=int, default=100, help="of an answer, at most")
    parser.add_argument("--at", type=int, default=4, help="questions that are answered at once")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    questions = chosen(arguments.questions, arguments.part, arguments.each)
    for speculation in arguments.speculation:
        print(speculation, flush=True)
        found = {way: measure(arguments, speculation, way, questions) for way in arguments.ways}
        lengths = {way: 1 + one.held / max(1, one.steps) for way, one in found.items()}
        told = [f"accepted length {way} {length:.2f}" for way, length in lengths.items()]
        if {"greedy", "sampled"} <= lengths.keys():
            told.append(f"sampled / greedy {lengths['sampled'] / lengths['greedy']:.2f}")
        if {*WAYS[1:]} <= lengths.keys():
            told.append(f"sampled / of greedy drafts {lengths['sampled'] / lengths[WAYS[2]]:.2f}")
        print(f"  {'; '.join(told)}", flush=True)


if __name__ == "__main__":
    main()
