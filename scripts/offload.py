"""Layers that are not on the device: decode and prefill against resident weights, and against the bytes to bring.

    python scripts/offload.py --shares 0.3 0.6 --rounds 5
    python scripts/offload.py --device cuda --model Qwen/Qwen3-30B-A3B --max-memory-gib 24 --shares auto --no-resident
    python scripts/offload.py --device cuda --model FOLDER --load-format dummy --shares auto --no-resident

The second one is a mixture on a GPU that is capped to 24 GiB, the third one any config.json, such as that of a dense
model of 70 billion parameters. In every round each way decodes and reads prompts in turn, and the link is measured:
from disk by reading the prepared layers with as many threads as the engine has and nothing else to do, to a GPU by
copies of pinned memory. `bound` is how long a step's bytes take at the median of that; `busy` is the share of the time
of decode steps in which something was on its way (of a disk), which others' use of the disk does not change: 100 % is
all that can be had. Tokens have to be equal.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import torch

from tokenmill import LLM, SamplingParams
from tokenmill.offload.copy_feed import CudaStreams
from tokenmill.offload.disk_feed import READERS, DiskFeed
from tokenmill.offload.layer_file import room

GIB = 1 << 30


def link_speed(llm: LLM) -> float:
    """Bytes per second that could be brought, were nothing else to be done."""
    feed = llm._built.engine.feed
    if isinstance(feed, DiskFeed):
        file = feed.file
        rooms = [room(one.image.nbytes) for one in file.entries]
        began = time.perf_counter()
        with ThreadPoolExecutor(READERS) as readers:
            pieces = [(layer, piece) for layer, one in enumerate(file.entries) for piece in range(one.pieces)]
            total = sum(readers.map(lambda one: file.read(*one, rooms[one[0]]), pieces))
        return total / (time.perf_counter() - began)
    streams = CudaStreams(torch.device("cuda"))
    source, into = streams.host_memory(GIB), torch.empty(GIB, dtype=torch.uint8, device="cuda")
    seconds = []
    for _ in range(4):
        torch.cuda.synchronize()
        began = time.perf_counter()
        streams.copy(into, source, None)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return GIB / min(seconds)


def prefill_and_decode(
    llm: LLM, rows: int, prompt: int, output: int, seed: int
) -> tuple[float, float, float, list[list[int]]]:
    """Seconds to read all prompts, of a step that decodes, the link's share of that; and what was said."""
    prompts = [
        {"prompt_token_ids": [5 + (seed + 31 * row + 7 * at) % 900 for at in range(prompt)]} for row in range(rows)
    ]
    once = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    began = time.perf_counter()
    llm.generate(prompts, once, use_tqdm=False)
    read = time.perf_counter() - began
    before = moving(llm)
    began = time.perf_counter()  # the prompts are cached now
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=output, ignore_eos=True), use_tqdm=False)
    seconds = time.perf_counter() - began
    busy = (moving(llm) - before) / seconds
    return read, seconds / output, busy, [list(one.outputs[0].token_ids) for one in outputs]


def moving(llm: LLM) -> float:
    feed = llm._built.engine.feed
    return 0.0 if feed is None else feed.stats().moving_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="default")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quantization", default=None)
    parser.add_argument(
        "--shares", nargs="+", default=["0.3", "0.6"], help="of the layers' bytes; auto: what does not fit"
    )
    parser.add_argument("--max-memory-gib", type=float, default=None)
    parser.add_argument("--no-resident", action="store_true", help="there is no room for it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--output", type=int, default=32)
    args = parser.parse_args()

    base = {
        "model": args.model, "load_format": args.load_format, "device": args.device, "quantization": args.quantization,
        "max_num_seqs": max(args.rows, 2), "max_model_len": args.prompt + args.output + 16, "speculation": "off",
        "skip_tokenizer_init": True,
    }  # fmt: skip
    ways: dict[str, LLM] = {} if args.no_resident else {"resident": LLM(**base, weights_offload=0)}
    if args.max_memory_gib is not None:
        base["max_memory"] = int(args.max_memory_gib * GIB)
    for share in args.shares:
        if share == "auto":
            ways["what does not fit"] = LLM(**base)
            continue
        whole = ways["resident"]._built.settings.memory.weights
        ways[f"{float(share):.0%} streamed"] = LLM(**base, weights_offload=int(float(share) * whole))
    speeds: list[float] = []
    reads: dict[str, list[float]] = {name: [] for name in ways}
    steps: dict[str, list[float]] = {name: [] for name in ways}
    busies: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(args.rounds + 1):  # the first one records steps
        said = {}
        for name, llm in ways.items():
            read, step, busy, said[name] = prefill_and_decode(llm, args.rows, args.prompt, args.output, 1000 * turn)
            if turn:
                reads[name].append(read)
                steps[name].append(step)
                busies[name].append(busy)
        assert len({str(one) for one in said.values()}) == 1, "the tokens differ"
        speeds.append(link_speed(list(ways.values())[-1]))
    speed = median(speeds[1:])
    what = f"{args.rows} rows, prompts of {args.prompt}, {args.output} tokens"
    least, most = min(speeds) / 1e9, max(speeds) / 1e9
    print(f"link {speed / 1e9:.2f} GB/s (from {least:.2f} to {most:.2f}); {what}; the same tokens")
    for name, llm in ways.items():
        away, feed = llm._built.settings.memory.streamed, llm._built.engine.feed
        step, read = median(steps[name]), median(reads[name])
        line = f"{name:18} {1e3 * step:.1f} ms a step, {1e3 * read:.0f} ms of prompts"
        if "resident" in ways:
            there = median(steps["resident"]), median(reads["resident"])
            line += f"; {step / there[0]:.2f} and {read / there[1]:.2f} times resident"
        if feed is not None:
            found, bound = feed.stats(), max(away.nbytes / speed, median(steps.get("resident", [0.0])))
            line += f"; {len(away.layers)} layers, {away.nbytes / 1e6:.0f} MB a step; {bound / step:.2f} of the bound"
            line += (
                f"; link {median(busies[name]):.0%} busy; {found.overlap_seconds / found.moving_seconds:.0%} overlapped"
            )
        print(line)


if __name__ == "__main__":
    main()
