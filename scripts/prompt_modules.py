"""How close modules come to reading, and how much sooner the first token is there: `scripts/prompt_modules.py TEXT`.

TEXT is a file of articles with headings such as " = Title = " (WikiText). A prompt is a few documents in any order and
a beginning of how the last one goes on; its next-token distribution, where all is read, is compared with that where the
documents are modules. Naive: each computed standing alone, with nothing before it, and nothing read again.
"""

from __future__ import annotations

import argparse
import random
import re
import time
from dataclasses import replace
from pathlib import Path
from statistics import mean

import torch

from tokenmill import LLM, SamplingParams
from tokenmill.engine.request import Module, Request
from tokenmill.engine.scheduler.modules import Modules
from tokenmill.engine.step import Step
from tokenmill.kv.moves import Placement

BEFORE = "Read these articles.\n"
WAYS = (
    "none/first:0,none/first:24,one/first:0,one/first:24,text/first:0,text/first:4,text/first:8,text/first:16,"
    "text/first:24,text/first:64,text/last:24,text/deviating:24"
)
FIRST = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)


class Bench:
    def __init__(self, llm: LLM) -> None:
        self.llm, self.engine = llm, llm._built.engine
        self.runner, self.kv = self.engine.runner, self.engine.scheduler.kv
        self.modules = self.engine.scheduler.modules
        assert self.modules is not None
        self.rules = self.modules.rules
        sampler = self.runner.sampler
        inner = sampler.sample
        self._logits = torch.empty(0)

        def sample(logits, *rest):
            self._logits = logits.detach().float().log_softmax(-1).clone()
            return inner(logits, *rest)

        sampler.sample = sample

    def next_token(self, before, documents, after, marked):
        """Log-probabilities of what follows, seconds of the CPU, and tokens that were copied."""
        parts = [{"prompt_token_ids": before}]
        parts += [{"prompt_token_ids": one, "cache_module": marked} for one in documents]
        began = time.process_time()
        [output] = self.llm.generate({"prompt": [*parts, after]}, FIRST, use_tqdm=False)
        assert output.error is None, output.error
        return self._logits[-1], time.process_time() - began, output.num_module_tokens

    def use(self, start: list[int] | None, rule: str, k: int) -> None:
        self.modules.__dict__.pop("start", None)
        first = k if rule == "first" else 0
        self.modules.rules = replace(self.rules, start=(lambda: start) if start is not None else self.rules.start)
        self.modules.rules = replace(self.modules.rules, reread=first)

    def values(self, chain: list[bytes], first: int, count: int) -> torch.Tensor:  # [layers, count, heads, dim]
        blocks = self.kv.index.find_leading(chain)
        state = self.runner.state
        at = torch.arange(first, first + count)
        where = torch.tensor(blocks)[at // state.block_size], at % state.block_size
        return torch.stack([layer.v[where].float() for layer in state.kv])


def choose_others(bench: Bench, rule: str, k: int, prompt: list[int], documents: list[list[int]], head: int):
    """Rules that the engine does not have: which tokens of every document are read. "deviating" knows what reading
    gives, so no real rule can be as good: those whose values differ most from what is copied."""
    chosen = []
    read = bench.kv.chain("", prompt[: len(prompt) // 16 * 16])
    at = head
    for one in documents:
        if rule == "last":
            chosen.append(set(range(len(one) - k, len(one))))
        elif rule == "spread":
            chosen.append(set(range(0, len(one), max(1, len(one) // k))) if k else set())
        else:
            alone = bench.modules._tokens(Request("x", one, FIRST, max_tokens=1, seed=0), Module(0, len(one)))
            there = bench.values(bench.kv.chain("", alone), len(bench.modules.start), len(one))
            real = bench.values(read, at, len(one))
            norm = real.pow(2).sum((2, 3)).mean(1, keepdim=True)
            score = ((real - there).pow(2).sum((2, 3)) / norm).mean(0)
            chosen.append(set(score.topk(k).indices.tolist()) if k else set())
        at += len(one)
    return chosen


def cut(chosen):
    """A `Modules.place` that leaves out what was chosen."""

    def place(self: Modules, step: Step, request: Request) -> list[int]:
        sources: dict[int, None] = {}
        for one, left_out in zip(request.modules, chosen, strict=True):
            blocks, first = tuple(self._blocks_of(one)), None
            for at in range(one.end - one.first + 1):
                copied = at < one.end - one.first and at not in left_out
                if copied and first is None:
                    first = at
                elif not copied and first is not None:
                    source = len(self.start) + first
                    step.placements.append(Placement(request.row, one.first + first, at - first, source, blocks))
                    request.copied.append((one.first + first, one.first + at))
                    first = None
            sources.update(dict.fromkeys(blocks))
        request.num_exact = request.copied[0][0]
        self.kv.pool.share(sources)
        return list(sources)

    return place


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default="default")
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--places", type=int, default=8, help="of every prompt where the next token is compared")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--module-start", help="a file for the start that is called text; unset: tokenmill's own")
    parser.add_argument("--module-start-tokens", type=int, help="how much of it")
    parser.add_argument("--ways", default=WAYS, help="start/rule:tokens; a start is none, one (token) or text")
    args = parser.parse_args()
    torch.set_num_threads(1)
    length = args.documents * args.tokens + 1024
    llm = LLM(
        args.model, max_model_len=max(8192, length), max_num_seqs=2, speculation="off",
        module_start=args.module_start, module_start_tokens=args.module_start_tokens,
        kv_cache_dtype=args.kv_cache_dtype, kv_cache_memory=1 << 30,
    )  # fmt: skip
    bench, tokenizer = Bench(llm), llm.get_tokenizer()
    assert tokenizer is not None
    print(next(line for line in llm.plan_lines() if line.startswith("modules")), flush=True)
    articles = re.split(r"(?m)^ (?== [^=].* =\s*$)", args.text.read_text())
    encoded = [tokenizer.encode(one, add_special_tokens=False) for one in articles]
    texts = [one for one in encoded if len(one) > args.tokens + 8 * args.places]
    before = tokenizer.encode(f"<|im_start|>user\n{BEFORE}", add_special_tokens=False)
    one_token = bench.modules.start[:1]
    starts = {"none": [], "one": one_token, "text": None}
    chooser, place = random.Random(7), Modules.place
    found: dict[tuple[str, str, int], list[tuple[float, float, float]]] = {}
    ratios: dict[tuple[str, str, int], list[float]] = {}
    for number in range(args.prompts):
        picked = chooser.sample(texts, args.documents)
        documents = [one[: args.tokens] for one in picked]
        after = [picked[-1][args.tokens : args.tokens + 8 * (n + 1)] for n in range(args.places)]
        wanted, seconds = [], 0.0
        for n, rest in enumerate(after):
            logs, took, _ = bench.next_token(before, documents, rest, marked=False)
            seconds = took if n == 0 else seconds
            wanted.append(logs)
        everything = before + [token for one in documents for token in one] + after[-1]
        for tried, way in enumerate(args.ways.split(",")):
            start, rule, k = re.fullmatch(r"(\w+)/(\w+):(\d+)", way).groups()
            bench.use(starts[start], rule, k := int(k))
            bench.next_token([one_token[0], 11 + number, 11 + tried], documents, after[0], marked=True)  # has them made
            if rule != "first":
                Modules.place = cut(choose_others(bench, rule, k, everything, documents, len(before)))
            match, bench.kv.match = bench.kv.match, lambda request: []  # all has been read: nothing is to be found
            for n, rest in enumerate(after):
                logs, took, _ = bench.next_token(before, documents, rest, marked=True)
                if n == 0:
                    ratios.setdefault((start, rule, k), []).append(seconds / took)
                kl = float((wanted[n].exp() * (wanted[n] - logs)).sum())
                same = float(wanted[n].argmax() == logs.argmax())
                found.setdefault((start, rule, k), []).append((kl, k / args.tokens, same))
            bench.kv.match, Modules.place = match, place
        print(f"prompt {number + 1} of {args.prompts}: {seconds:.1f} s of the CPU to read it", flush=True)
    naive = mean(one[0] for one in found[next(iter(found))])
    print(f"{'start':>5} {'read again':>14} {'share':>6} {'KL':>8} {'gap closed':>10} {'same token':>10} {'sooner':>7}")
    for (start, rule, k), ones in found.items():
        kl = mean(one[0] for one in ones)
        print(
            f"{start:>5} {rule:>10} {k:>3} {ones[0][1]:6.1%} {kl:8.4f} {1 - kl / naive:10.1%} "
            f"{mean(one[2] for one in ones):10.1%} {mean(ratios[start, rule, k]):6.1f}x",
            flush=True,
        )


if __name__ == "__main__":
    main()
