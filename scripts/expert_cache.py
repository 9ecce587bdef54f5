"""A mixture whose experts do not fit: the cache of experts against streaming whole layers, in as much memory.

    python scripts/expert_cache.py --turns 3
    python scripts/expert_cache.py --turns 3 --skew 1.0

The model has random weights and the shape of a small Qwen3-MoE, and requests sample their tokens, so that they do not
end in a loop. With --skew some experts are preferred: each row of a router is multiplied by a power of its rank, in an
order of its own for every layer. That is no trained router, whose habits follow the text; it shows what the cache does
where choices are uneven. (Routers of streamed layers are read again in every step, so those stay as they are.) Every
way gets the same requests in turns. Per token: bytes that were read, CPU time of the process (reading and checking
included), experts that were there. Tokens have to be equal.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from cpu_moe import SHAPE

from tokenmill import LLM, SamplingParams
from tokenmill.offload.feed import FeedStats

KINDS = {"1 row": (1, 8, 48), "8 rows": (8, 8, 24), "a prompt of 512": (1, 512, 1)}  # rows, prompt, output


def skew(llm: LLM, power: float) -> None:
    weights, spec = llm._built.engine.runner.decoder.weights, llm._built.spec
    generator = torch.Generator().manual_seed(1)
    for layer in range(spec.num_layers):
        router = weights.peek(layer).mlp.router
        ranks = torch.randperm(len(router), generator=generator) + 1
        router.mul_((4 * ranks.float().pow(-power))[:, None])


def generate(llm: LLM, kind: str, turn: int) -> tuple[float, list[list[int]]]:
    rows, length, output = KINDS[kind]
    prompts = [
        {"prompt_token_ids": [(turn * 7919 + row * 31 + at * 53) % 16000 + 5 for at in range(length)]}
        for row in range(rows)
    ]
    params = [
        SamplingParams(temperature=1.0, seed=100 * turn + n, max_tokens=output, ignore_eos=True) for n in range(rows)
    ]
    began = time.process_time()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return time.process_time() - began, [list(one.outputs[0].token_ids) for one in outputs]


def stats(llm: LLM) -> FeedStats:
    feed = llm._built.engine.feed
    return FeedStats() if feed is None else feed.stats()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--share", type=float, default=0.5, help="of the experts' bytes that there is no room for")
    parser.add_argument("--skew", type=float, default=0.0)
    parser.add_argument("--quantization", default="int8")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": args.layers}))
        base = {
            "model": folder, "load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu", "max_num_seqs": 8,
            "quantization": args.quantization, "max_model_len": 1024, "speculation": "off", "kv_cache_memory": 1 << 26,
            "enable_prefix_caching": False, "cache_dir": str(Path(folder, "cache")),
        }  # fmt: skip
        ways = {"resident": LLM(**base, weights_offload=0)}
        whole, experts = ways["resident"]._built.settings.memory.total, ways["resident"]._built.engine
        held = sum(
            one.nbytes
            for layer in range(args.layers)
            for matrices in (experts.runner.decoder.weights.peek(layer).mlp,)
            for side in (matrices.gate_up, matrices.down)
            for one in (storage.matrix for storage in side.storages)
        )
        limit = whole - int(args.share * held)
        for name, cache in (("layers", "off"), ("lru", "lru"), ("predict", "predict"), ("auto", "auto")):
            ways[name] = LLM(**base, max_memory=limit, expert_cache=cache)
        for name, llm in ways.items():
            skew(llm, args.skew) if args.skew else None
            for line in llm.plan_lines():
                if line.startswith(("experts", "streaming", "weights_offload")):
                    print(f"{name:9} {line}")
        print(
            f"experts take {held / 1e6:.0f} MB; {limit / 1e6:.0f} MB may be used of the {whole / 1e6:.0f} that all take"
        )
        print(
            "| requests | way | MB read per token | CPU ms per token | of streamed layers | there | foreseen | waited |"
        )
        print("|---|---|---:|---:|---:|---:|---:|---:|")
        for kind, (rows, length, output) in KINDS.items():
            tokens = rows * output if output > 1 else length
            found: dict[str, list[tuple[float, float, FeedStats, FeedStats]]] = {name: [] for name in ways}
            for turn in range(args.turns + 1):  # the first one records steps
                said = {}
                for name, llm in ways.items():
                    before = stats(llm)
                    seconds, said[name] = generate(llm, kind, turn)
                    after = stats(llm)
                    if turn:
                        found[name].append((after.nbytes - before.nbytes, seconds, before, after))
                if args.skew:
                    said.pop("layers")
                assert len({str(one) for one in said.values()}) == 1, "the tokens differ"
            layers = median(one[1] for one in found["layers"])
            for name, runs in found.items():
                nbytes, seconds = median(one[0] for one in runs), median(one[1] for one in runs)
                cells = [kind, name, f"{nbytes / tokens / 1e6:.2f}", f"{1000 * seconds / tokens:.2f}"]
                cells.append(f"{seconds / layers:.2f}")
                first, last = runs[0][2].experts, runs[-1][3].experts
                if first is None or last is None:
                    cells += ["-"] * 3
                else:
                    kinds = (last.hits - first.hits, last.foreseen - first.foreseen, last.misses - first.misses)
                    cells += [f"{one / max(1, sum(kinds)):.0%}" for one in kinds]
                print(f"| {' | '.join(cells)} |", flush=True)
        for llm in ways.values():
            llm.shutdown()


if __name__ == "__main__":
    main()
