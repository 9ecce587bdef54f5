"""What drafts bring on real prompts: tokens per second with and without, in turns, by how many requests run at once.

    python scripts/gpu_speculation.py questions.jsonl --model default --speculation suffix,head:FILE --at 1 32 256

The file has a JSON object per line with `turns`, as Spec-Bench and MT-Bench have them; questions are taken from all
over it, and answers end where the model ends them. `--ways trees chains` has the device's drafts verified in that way
wherever they can be, whatever the clock says (`clock`: as the engine does it). docs/performance.md lists what to run
on a GPU, under *Drafts on a GPU*.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path

from tokenmill import LLM, SamplingParams
from tokenmill.engine.runner.torch_runner import TorchRunner
from tokenmill.engine.speculation.device_budget import DeviceBudget


class Always(DeviceBudget):
    """Verifies as many of the device's drafts as there are, as trees or as chains."""

    trees = True

    def rests(self, rows: int) -> bool:
        return False

    def turn(self, rows: int, most: int, branches: bool = False) -> int:
        self.tree = self.trees and branches
        return self._length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("questions", type=Path)
    parser.add_argument("--model", default="default")
    parser.add_argument("--speculation", default="suffix")
    parser.add_argument("--at", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--least", type=int, default=24, help="questions of a turn")
    parser.add_argument("--device", default="auto", help="cpu: to see that this starts; a CPU drafts chains alone")
    parser.add_argument("--ways", nargs="+", choices=["clock", "trees", "chains"], default=["clock"])
    arguments = parser.parse_args()
    lines = arguments.questions.read_text().splitlines()
    texts = [json.loads(line)["turns"][0][:4000] for line in lines]
    llm = LLM(model=arguments.model, speculation=arguments.speculation, max_model_len=2048, device=arguments.device)
    engine = llm._built.engine
    speculation = engine.speculation
    assert speculation is not None
    for future in speculation.coming:
        future.result()
    budget = speculation.budget
    runner = engine.runner
    assert isinstance(runner, TorchRunner)
    params = SamplingParams(temperature=arguments.temperature, max_tokens=arguments.tokens, seed=1)

    def run(some: list[str], at: int, on: bool) -> tuple[float, int, list[list[int]]]:
        engine.speculation = speculation if on else None
        engine.scheduler.drafting = False
        llm.reset_prefix_cache()
        began, steps, answers = time.perf_counter(), engine.scheduler.stats.steps, []
        for first in range(0, len(some), at):
            chats = [[{"role": "user", "content": text}] for text in some[first : first + at]]
            answers += [list(one.outputs[0].token_ids) for one in llm.chat(chats, params, use_tqdm=False)]
        return time.perf_counter() - began, engine.scheduler.stats.steps - steps, answers

    for at, way in itertools.product(arguments.at, arguments.ways):
        if budget is not None:
            budget.__class__, Always.trees = DeviceBudget if way == "clock" else Always, way == "trees"
        count = max(arguments.least, at)
        some = [texts[i * len(texts) // count] for i in range(count)]  # of every category
        run(some[:at], at, True)
        run(some[:at], at, False)
        for _ in range(arguments.turns):
            before = {name: (one.drafted, one.accepted, one.steps) for name, one in speculation.stats.items()}
            kinds = dict(runner.steps_of)
            (plain, steps, expected), (drafted, fewer, found) = run(some, at, False), run(some, at, True)
            same = sum(one == other for one, other in zip(expected, found, strict=True))
            told = {
                name: f"{one.accepted - before[name][1]} of {one.drafted - before[name][0]}"
                for name, one in speculation.stats.items()
            }
            ran = {kind.value: count - kinds[kind] for kind, count in runner.steps_of.items() if count > kinds[kind]}
            print(
                f"{at:4d} at once, {way}: {plain:.3f} s, {drafted:.3f} s with drafts: x {plain / drafted:.2f}; "
                f"steps {steps} and {fewer}: x {steps / fewer:.2f}; the same answer {same} of {len(some)}; "
                f"held {told}; steps of {ran}",
                flush=True,
            )


if __name__ == "__main__":
    main()
