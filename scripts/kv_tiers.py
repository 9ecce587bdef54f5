"""Conversations of several times the KV that an engine has room for: with and without host memory and disk behind it.

    python scripts/kv_tiers.py --rounds 3 --times 5

Users speak in turn, each with all that was said before; when somebody speaks again, the others have pushed what was
known of it out. Printed: how many of the prompts' tokens were computed, and the time of each way against none,
interleaved. The answers have to be those of an engine with plenty of memory, whose prefix cache loses nothing.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from statistics import median

from tokenmill import LLM, SamplingParams

BLOCK = 16


def conversations(llm: LLM, users: int, turns: int, first: int, more: int, output: int) -> list[list[int]]:
    """What was said."""
    rng = random.Random(1)
    texts = [[rng.randrange(1000, 20000) for _ in range(first)] for _ in range(users)]
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    said: list[list[int]] = []
    for _ in range(turns):
        for user, one in enumerate(llm.generate([{"prompt_token_ids": text} for text in texts], params)):
            tokens = list(one.outputs[0].token_ids)
            said.append(tokens)
            texts[user] += tokens + [rng.randrange(1000, 20000) for _ in range(more)]
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--times", type=float, default=5.0, help="how many times the device's KV all texts take")
    parser.add_argument("--users", type=int, default=12)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--first", type=int, default=200, help="tokens of the first prompt")
    parser.add_argument("--more", type=int, default=100, help="and of each later one")
    parser.add_argument("--output", type=int, default=16)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--kv-bytes-per-token", type=int, default=23_040)
    args = parser.parse_args()

    longest = args.first + args.turns * (args.more + args.output)
    tokens = int(args.users * longest / args.times)
    base = {
        "model": args.model, "max_num_seqs": args.rows, "max_model_len": -(-longest // BLOCK) * BLOCK,
        "kv_cache_memory": max(tokens, longest + BLOCK) * args.kv_bytes_per_token, "speculation": "off",
        "skip_tokenizer_init": True,
    }  # fmt: skip
    shape = args.users, args.turns, args.first, args.more, args.output
    with tempfile.TemporaryDirectory() as folder:
        ways = {
            "plenty": {"kv_cache_memory": 1 << 30},
            "none": {},
            "host": {"kv_host_memory": 1 << 30},
            "disk": {"kv_disk_path": folder, "kv_disk_bytes": 1 << 30},
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        work: dict[str, list[float]] = {
            name: [] for name in ways
        }  # of the CPU, which others on the machine disturb less
        answers = None
        for turn in range(args.rounds):
            for name, options in ways.items():
                if name == "disk":  # an engine that finds nothing there
                    options = options | {"kv_disk_path": f"{folder}/{turn}"}
                with LLM(**base | options) as llm:
                    engine = llm._built.engine
                    started, worked = time.perf_counter(), time.process_time()
                    said = conversations(llm, *shape)
                    seconds[name].append(time.perf_counter() - started)
                    work[name].append(time.process_time() - worked)
                    answers = answers or said
                    equal = sum(a == b for a, b in zip(said, answers))
                    cache, transfers = engine.scheduler.kv.stats, engine.scheduler.kv.transfers
                    computed = f"{cache.queried - cache.hit:,} of {cache.queried:,} prompt tokens computed"
                    line = f"{name:6} {seconds[name][-1]:6.1f} s, {work[name][-1]:6.1f} s of CPU, {computed}"
                    if transfers is not None:
                        (tier,) = transfers.tiers
                        line += f", {tier.stats}, {tier.bandwidth / 1e9:.2f} GB/s"
                    print(f"{line}, {equal} of {len(said)} answers equal", flush=True)
        for name in ways:
            for what, figures in (("throughput", seconds), ("work per second of CPU", work)):
                ratios = [none / one for none, one in zip(figures["none"], figures[name])]
                print(f"{name}: {median(ratios):.2f} times the {what} of none ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
