"""What pruning costs in quality on a real model: perplexity, needles and key-value recall by keep ratio.

    python scripts/kv_pruning.py train TEXT... --gate FILE                the gate that the package ships, by its seed
    python scripts/kv_pruning.py judge wikitext2_raw_test.txt --gate FILE --json FILE    curves of docs/performance.md

Every judged pass is the engine's own decoder, op by op, with another attention: in plain torch, under the mask that a
policy leaves. What a query sees is what it sees in the engine: sinks, survivors of the segments that have left the
recent window, and that window. H2O, SnapKV and Quest need queries that come later (or all keys), so they are here for
comparison only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from tokenmill.config import EngineConfig
from tokenmill.draft.states import packed, runner_of
from tokenmill.engine.build import Built, build
from tokenmill.engine.runner.pruner import unrotated
from tokenmill.model.kv_gate import FORMAT, KVGate, features, load_gate
from tokenmill.ops.kv_forms import form_for, gather, quantize

SINKS, WINDOW, SEGMENT = 16, 64, 128
Scores = Callable[
    [int, torch.Tensor, torch.Tensor], torch.Tensor
]  # layer, unrotated keys, values -> [kv_heads, tokens]


@dataclass(frozen=True)
class Plan:
    """One way to drop keys. keep: of a segment that has left the window."""

    name: str
    keep: float = 1.0
    window: int = WINDOW
    scores: Scores | None = None  # functions of the prefix
    kind: str = "prefix"  # or h2o, snapkv, quest
    kv: str = "float32"
    shared_heads: bool = False

    def live(self, length: int) -> float:
        """Of the keys of so many tokens, the share that is there at the end."""
        gone = max(0, (length // SEGMENT * SEGMENT - self.window - SINKS) // SEGMENT) * SEGMENT
        return 1 - gone * (1 - self.keep) / length


class Reader:
    """Runs the decoder over one text at a time, under a plan."""

    def __init__(self, model: str, length: int) -> None:
        self.built: Built = build(
            EngineConfig(model=model, device="cpu", max_model_len=length, max_num_seqs=1, max_num_batched_tokens=length,
                         kv_cache_dtype="float32", speculation="off", warm_up=False)
        )  # fmt: skip
        runner = runner_of(self.built)
        self.decoder, self.state, self.spec = runner.decoder, runner.state, runner.decoder.spec
        self.tokenizer = self.built.tokenizer
        assert self.tokenizer is not None

    def ids(self, text: str) -> list[int]:
        assert self.tokenizer is not None
        return list(self.tokenizer.encode(text))

    @torch.inference_mode()
    def hidden(
        self, ids: list[int], attend: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        tokens = packed([len(ids)], torch.tensor(ids), self.state.block_size, self.state.max_blocks)

        def mixed(layer: int, q: torch.Tensor) -> torch.Tensor:
            cache = self.state.kv[layer]
            k, v = (one.flatten(0, 1)[tokens.slots] for one in (cache.k, cache.v))
            return attend(layer, q, k, v)

        tokens.attend = mixed
        return self.decoder.forward(tokens, self.state.kv)

    def unrotated(self, layer: int, k: torch.Tensor) -> torch.Tensor:
        return unrotated(k, self.decoder.rope_tables[layer], 0)


def attention_under(plan: Plan, reader: Reader, prompt: int) -> Callable[..., torch.Tensor]:
    """prompt: tokens that are read before anything is dropped, where a plan needs a whole prompt."""
    spec = reader.spec
    group, scale = spec.heads // spec.kv_heads, spec.attn_scale

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        n = len(q)
        raw = k
        if plan.kv != "float32":
            form = form_for(getattr(torch, plan.kv))
            k, v = (dequantized(one, form) for one in (k, v))
        queries = q.view(n, spec.kv_heads, group, -1).permute(1, 2, 0, 3)  # [kv, group, n, dim]
        keys, values = k.permute(1, 0, 2), v.permute(1, 0, 2)  # [kv, n, dim]
        key_at = torch.arange(n)
        out = torch.empty_like(queries)
        alive = torch.ones(spec.kv_heads, n, dtype=torch.bool)
        mass = torch.zeros(spec.kv_heads, n)
        importance = None
        if plan.scores is not None and plan.keep < 1:
            importance = plan.scores(layer, reader.unrotated(layer, raw), v)
            if plan.shared_heads:
                importance = importance.mean(0, keepdim=True).expand(spec.kv_heads, -1)
        snap = snapped(queries, keys, prompt, n, plan, scale) if plan.kind == "snapkv" else None
        starts = list(range(0, n, SEGMENT))
        done = SINKS
        for start in starts:
            end = min(n, start + SEGMENT)
            if plan.kind in ("prefix", "h2o") and plan.keep < 1:
                while done + SEGMENT + plan.window <= start:
                    kept = round(plan.keep * SEGMENT)
                    if plan.kind == "h2o":  # of all that is beyond the window, those with most attention so far
                        done += SEGMENT
                        budget = round(plan.keep * (done - SINKS))
                        ranked = mass[:, SINKS:done].masked_fill(~alive[:, SINKS:done], -1)
                        alive[:, SINKS:done] = False
                        alive.scatter_(1, ranked.topk(budget, 1).indices + SINKS, True)
                        continue
                    part = slice(done, done + SEGMENT)
                    alive[:, part] = False
                    if kept and importance is not None:
                        alive.scatter_(1, importance[:, part].topk(kept, 1).indices + done, True)
                    done += SEGMENT
            at = torch.arange(start, end)
            seen = (key_at[None, :end] <= at[:, None])[None] & alive[:, None, :end]  # [kv, q, k]
            scores = torch.einsum("hgqd,hkd->hgqk", queries[:, :, start:end], keys[:, :end]) * scale
            if plan.kind == "quest":
                seen = seen & pages_chosen(queries[:, :, start:end], keys[:, :end], at, plan)
            if snap is not None:
                late = at >= prompt
                seen = seen & (~late[None, :, None] | snap[:, None, :end])
            weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
            if plan.kind == "h2o":
                mass[:, :end] += weights.sum((1, 2))
            out[:, :, start:end] = torch.einsum("hgqk,hkd->hgqd", weights, values[:, :end])
        return out.permute(2, 0, 1, 3).reshape(n, spec.heads, -1)

    return attend


def snapped(queries: torch.Tensor, keys: torch.Tensor, prompt: int, n: int, plan: Plan, scale: float) -> torch.Tensor:
    """SnapKV: what the last queries of the prompt look at, smoothed over neighbours; per head."""
    last = 32
    scores = torch.einsum("hgqd,hkd->hgqk", queries[:, :, prompt - last : prompt], keys[:, :prompt]) * scale
    causal = torch.arange(prompt)[None] <= torch.arange(prompt - last, prompt)[:, None]
    mass = scores.masked_fill(~causal, float("-inf")).softmax(-1).sum((1, 2))
    pooled = F.max_pool1d(mass[:, None], 7, stride=1, padding=3)[:, 0]
    pooled[:, prompt - last :] = float("inf")
    kept = torch.zeros(len(keys), n, dtype=torch.bool)
    kept[:, prompt:] = True
    kept.scatter_(1, pooled.topk(round(plan.keep * prompt), 1).indices, True)
    return kept


def pages_chosen(
    queries: torch.Tensor, keys: torch.Tensor, at: torch.Tensor, plan: Plan, page: int = 16
) -> torch.Tensor:
    """Quest: each query reads the pages that may hold its largest scores; nothing is dropped."""
    n = keys.shape[1]
    pages = -(-n // page)
    padded = F.pad(keys, (0, 0, 0, pages * page - n)).view(len(keys), pages, page, -1)
    low, high = padded.amin(2), padded.amax(2)
    bound = torch.einsum("hgqd,hpd->hgqp", queries.clamp_min(0), high) + torch.einsum(
        "hgqd,hpd->hgqp", queries.clamp_max(0), low
    )
    bound = bound.amax(1)
    own = at // page
    first = torch.arange(pages)[None, :]
    bound = bound.masked_fill(first[None] > own[None, :, None], float("-inf"))
    bound = bound.masked_fill((first == own[:, None])[None] | (first == 0)[None], float("inf"))
    budget = ((own + 1) * plan.keep).ceil().long().clamp_min(2)
    rank = bound.argsort(-1, descending=True).argsort(-1)
    chosen = rank < budget[None, :, None]
    return chosen.repeat_interleave(page, 2)[:, :, :n]


def dequantized(x: torch.Tensor, form: object) -> torch.Tensor:
    codes, scales = quantize(x[:, None], form)  # type: ignore[arg-type]
    return gather(codes, scales, torch.arange(len(x)), torch.float32)[:, 0]


def key_norm(layer: int, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return -k.norm(dim=-1).T


class Trained(torch.nn.Module):
    """A gate with two outputs for each head: how much a token will get at most, and on the average."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor, width: int = 24) -> None:
        super().__init__()
        layers, size, outputs = len(inputs), inputs.shape[2], targets.shape[2]
        wide = [one.float() for one in inputs]
        self.mean, self.std = (torch.stack(x) for x in zip(*((x.mean(0), x.std(0).clamp_min(1e-3)) for x in wide)))
        self.up = torch.nn.Parameter(torch.randn(layers, size, width) / math.sqrt(size))
        self.up_bias = torch.nn.Parameter(torch.zeros(layers, width))
        self.down = torch.nn.Parameter(torch.randn(layers, width, outputs) / math.sqrt(width))
        self.down_bias = torch.nn.Parameter(targets.mean(1))
        self.direct = torch.nn.Parameter(torch.zeros(layers, size, outputs))

    def forward(self, layer: int, x: torch.Tensor) -> torch.Tensor:  # [tokens, inputs] -> [tokens, outputs]
        parts = (getattr(self, field.name) for field in fields(KVGate))
        return KVGate(*parts)(layer, x)

    def save(self, path: str) -> None:
        """Both outputs of a head are added up, which is one network again."""
        parts = {}
        for field in fields(KVGate):
            one = getattr(self, field.name).detach()
            if field.name in ("down", "down_bias", "direct"):
                most, mean = one.chunk(2, dim=-1)
                one = most + mean
            parts[field.name] = one.half().contiguous()
        save_file(parts, path, metadata={"format": FORMAT})
        print(f"{path}: sha256 {hashlib.sha256(Path(path).read_bytes()).hexdigest()}")


def gate_scores(gate: KVGate) -> Scores:
    return lambda layer, k, v: gate(layer, features(k, v)).T


def observe(reader: Reader, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """One text in full: the gate's inputs [layers, n, inputs] and targets [layers, n, 2 * kv_heads]."""
    spec = reader.spec
    group = spec.heads // spec.kv_heads
    inputs, targets = [], []

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        n = len(q)
        queries = q.view(n, spec.kv_heads, group, -1).permute(1, 2, 0, 3)
        scores = torch.einsum("hgqd,khd->hgqk", queries, k) * spec.attn_scale
        causal = torch.ones(n, n, dtype=torch.bool).tril()
        weights = scores.masked_fill_(~causal, float("-inf")).softmax(-1)
        out = torch.einsum("hgqk,khd->qhgd", weights, v).reshape(n, spec.heads, -1)
        far = torch.ones(n, n, dtype=torch.bool).tril(-WINDOW)
        later = (weights * far).flatten(0, 1).view(spec.kv_heads, group, n, n)
        size = v.norm(dim=-1).T  # [kv, n]
        most = later.amax((1, 2)) * size
        mean = later.sum((1, 2)) / (n - WINDOW - torch.arange(n)).clamp_min(1) * size
        inputs.append(features(reader.unrotated(layer, k), v).half())
        targets.append(torch.cat([most, mean]).clamp_min(1e-7).log().T)
        return out

    reader.hidden(ids, attend)
    return torch.stack(inputs), torch.stack(targets)


def train(arguments: argparse.Namespace) -> None:
    torch.manual_seed(arguments.seed)
    reader = Reader(arguments.model, 1024 + 64)
    chance = random.Random(arguments.seed)
    texts: list[list[int]] = []
    for path in arguments.texts:
        ids = reader.ids(Path(path).read_text()[:4_000_000][: arguments.contexts * 12_000])
        count = min(arguments.contexts, len(ids) // 1024)
        texts += [ids[1024 * i : 1024 * (i + 1)] for i in range(count)]
    filler = texts[0] + texts[-1]
    for _ in range(arguments.contexts // 2):
        for task in (needle, pairs):
            ids, answer = task(reader, chance, 1000, filler)
            texts.append(ids + answer)
    inputs, targets = [], []
    for number, ids in enumerate(texts):
        x, y = observe(reader, ids)
        last = len(ids) - WINDOW - 64
        inputs.append(x[:, SINKS:last])
        targets.append(y[:, SINKS:last])
        if number % 8 == 0:
            print(number, len(texts), flush=True)
    x, y = torch.cat(inputs, 1), torch.cat(targets, 1)
    gate = Trained(x, y)
    started, batch, steps = time.process_time(), 2048, arguments.steps
    optimizer = torch.optim.AdamW(gate.parameters(), lr=3e-3, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=steps)
    held = x.shape[1] * 9 // 10
    order = torch.randperm(x.shape[1])
    for step in range(steps):
        at = order[torch.randint(held, (batch,))]
        loss = torch.zeros(())
        for layer in range(len(x)):
            loss = loss + F.smooth_l1_loss(gate(layer, x[layer, at].float()), y[layer, at])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step}: {float(loss) / len(x):.4f}", flush=True)
    with torch.no_grad():
        rest = order[held:]
        corr = [
            torch.corrcoef(torch.stack([gate(layer, x[layer, rest].float())[:, one], y[layer, rest, one]]))[0, 1]
            for layer in range(len(x))
            for one in range(y.shape[2])
        ]
    seconds = time.process_time() - started
    print(f"correlation on held-out tokens {float(torch.stack(corr).mean()):.3f}, {seconds:.0f} s of CPU")
    gate.save(arguments.gate)


# What is asked

ANIMALS = """
otter falcon badger lynx heron marten bison gecko raven walrus beaver puffin jackal osprey tapir weasel
""".split()  # noqa: SIM905
WORDS = """
apple river stone cloud table music paper tiger window garden silver bridge candle forest market pencil rabbit
island bottle castle winter summer doctor engine flower guitar hammer jacket kitten ladder mirror needle
orange planet quartz rocket saddle temple violin wallet yellow zipper anchor basket camera desert falcon
harbor insect jungle kettle lemon magnet napkin oyster pepper ribbon salmon ticket turtle velvet wagon acorn
barrel cactus
""".split()  # noqa: SIM905


def needle(reader: Reader, chance: random.Random, length: int, filler: list[int]) -> tuple[list[int], list[int]]:
    name, code = chance.choice(ANIMALS), chance.randrange(1000, 10000)
    fact = reader.ids(f"\n\nRemember: the secret code of the {name} is {code}.\n\n")
    question = reader.ids(
        f"\n\nQuestion: What is the secret code of the {name}?\nAnswer: The secret code of the {name} is"
    )
    answer = reader.ids(f" {code}.")
    room = length - len(fact) - len(question)
    first = chance.randrange(max(1, len(filler) - room))
    text = filler[first : first + room]
    at = chance.randrange(0, max(1, room * 3 // 4))
    return text[:at] + fact + text[at:] + question, answer


def pairs(reader: Reader, chance: random.Random, length: int, filler: list[int]) -> tuple[list[int], list[int]]:
    names = chance.sample(WORDS, len(WORDS))
    lines = [(name, chance.choice(WORDS)) for name in names]
    ids, count = reader.ids("Dictionary\n"), 0
    while count < len(lines) and len(ids) + 16 < length:
        ids = ids + reader.ids(f"{lines[count][0]} -> {lines[count][1]}\n")
        count += 1
    name, value = lines[chance.randrange(0, max(1, count * 3 // 4))]
    return ids + reader.ids(f"{name} ->"), reader.ids(f" {value}\n")


def judge(arguments: argparse.Namespace) -> None:
    reader = Reader(arguments.model, 2048 + 64)
    gate = gate_scores(load_gate(Path(arguments.gate))) if arguments.gate else None
    plans = [Plan("full"), Plan("int8", kv="int8")]
    for keep in arguments.keep:
        plans.append(Plan("key norm", keep, scores=key_norm))
        if gate is not None:
            plans += [
                Plan("gate", keep, scores=gate),
                Plan("gate, heads share", keep, scores=gate, shared_heads=True),
                Plan("gate + int8", keep, scores=gate, kv="int8"),
            ]
        plans += [Plan("h2o", keep, kind="h2o"), Plan("quest", keep, kind="quest"), Plan("snapkv", keep, kind="snapkv")]
    if arguments.only:
        plans = [plan for plan in plans if plan.name in arguments.only]
    ids = reader.ids(Path(arguments.text).read_text()[:400_000])
    length = arguments.length
    windows = [ids[i * 9000 : i * 9000 + length] for i in range(arguments.windows)]
    plans = [replace(plan, window=arguments.window) for plan in plans]
    rows = []
    samples = []
    for task, sizes in ((needle, arguments.needle), (pairs, arguments.pairs)):
        for size in sizes:
            chance = random.Random(7)
            samples.append(
                (
                    task.__name__,
                    size,
                    [task(reader, chance, size, ids[100_000 % len(ids) // 2 :]) for _ in range(arguments.samples)],
                )
            )
    expanded = list(plans)
    if not arguments.only or "window" in arguments.only:
        expanded += [Plan("window", keep, window=arguments.window) for keep in arguments.keep]
    for plan in expanded:
        row: dict[str, object] = {"plan": plan.name, "keep": plan.keep}
        if plan.kind != "snapkv" and windows:
            losses = []
            for window in windows:
                used = at_equal_bytes(plan, length) if plan.name == "window" else plan
                losses += nll(reader, used, window)
            row |= {
                "perplexity": math.exp(statistics.fmean(losses)),
                "live": (at_equal_bytes(plan, length) if plan.name == "window" else plan).live(length),
            }
        for name, size, asked in samples:
            used = at_equal_bytes(plan, size) if plan.name == "window" else plan
            right = sum(answers(reader, used, *one) for one in asked)
            row[f"{name} {size}"] = right / len(asked)
        rows.append(row)
        print(json.dumps(row), flush=True)
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(rows, indent=1))


def at_equal_bytes(plan: Plan, length: int) -> Plan:
    """Sinks and a window as long as what another policy holds at the end."""
    live = replace(plan).live(length) * length
    window = int(live - SINKS - SEGMENT // 2) // 16 * 16
    return Plan(plan.name, 0.0, window=max(16, window))


def nll(reader: Reader, plan: Plan, ids: list[int]) -> list[float]:
    hidden = reader.hidden(ids, attention_under(plan, reader, len(ids)))
    with torch.inference_mode():
        first = len(ids) // 4
        logits = reader.decoder.logits(hidden[first:-1]).float()
        return F.cross_entropy(logits, torch.tensor(ids[first + 1 :]), reduction="none").tolist()


def answers(reader: Reader, plan: Plan, ids: list[int], answer: list[int]) -> bool:
    hidden = reader.hidden(ids + answer, attention_under(plan, reader, len(ids)))
    with torch.inference_mode():
        said = reader.decoder.logits(hidden[len(ids) - 1 : -1]).argmax(-1)
    return said.tolist() == answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("train")
    one.add_argument("texts", nargs="+")
    one.add_argument("--gate", required=True)
    one.add_argument("--contexts", type=int, default=12, help="of each text")
    one.add_argument("--steps", type=int, default=400)
    one.add_argument("--seed", type=int, default=0)
    one.set_defaults(run=train)
    one = commands.add_parser("judge")
    one.add_argument("text")
    one.add_argument("--gate")
    one.add_argument("--json")
    one.add_argument("--keep", type=float, nargs="*", default=[0.75, 0.5, 0.25])
    one.add_argument("--length", type=int, default=2048)
    one.add_argument("--windows", type=int, default=4)
    one.add_argument("--samples", type=int, default=12)
    one.add_argument("--needle", type=int, nargs="*", default=[512, 1024], help="tokens around a needle")
    one.add_argument("--pairs", type=int, nargs="*", default=[256, 384], help="tokens of a list of pairs")
    one.add_argument("--only", nargs="*")
    one.add_argument("--window", type=int, default=WINDOW)
    one.set_defaults(run=judge)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
