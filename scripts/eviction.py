"""Replays block traces under every policy of eviction, beside the optimum: a table, and a chart.

python scripts/eviction.py mooncake_conversation_trace.jsonl --half --sizes 1000 2000 3000 --plot eviction.svg
python scripts/eviction.py --made all --sizes 300 1000 2000
python scripts/eviction.py mooncake_conversation_trace.jsonl --sizes 2000 --block-size 16 --cost
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

from tokenmill.bench.plot import Series, chart
from tokenmill.kv.eviction import EVICTION
from tokenmill.kv.eviction.learned import LearnedPolicy
from tokenmill.kv.manager import KVManager
from tokenmill.plan.demand.traces import read_trace
from tokenmill.plan.replay.judge import Judged, judge
from tokenmill.plan.replay.replay import BlockTrace, ReplayedRequest
from tokenmill.plan.replay.traces import MADE, block_trace, in_smaller_blocks, made_trace

REPEATS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", type=Path, help="Mooncake's JSON lines, with prefix hashes")
    parser.add_argument("--made", help=f"made traces instead: all, or some of {', '.join(MADE)} by commas")
    parser.add_argument(
        "--sizes", nargs="+", type=int, default=[2000, 3000, 4000], help="of the cache, in the trace's blocks"
    )
    parser.add_argument("--half", action="store_true", help="judge the second half of the requests alone")
    parser.add_argument("--requests", type=int, help="the first so many of the trace")
    parser.add_argument("--block-size", type=int, help="divide the trace's blocks into blocks of so many tokens")
    parser.add_argument("--seed", type=int, default=0, help="of made traces")
    parser.add_argument("--cost", type=int, help="what evictions cost in a pool of so many blocks, instead")
    parser.add_argument("--plot", type=Path, help="a chart of the first trace (SVG)")
    options = parser.parse_args()
    if options.cost is not None:
        show_cost(options.cost)
        return
    if options.trace is not None:
        traces = [block_trace(read_trace(options.trace, options.requests))]
    else:
        names = list(MADE) if options.made in (None, "all") else options.made.split(",")
        traces = [made_trace(name, options.seed) for name in names]
    if options.block_size is not None:
        traces = [in_smaller_blocks(trace, options.block_size) for trace in traces]
    for number, trace in enumerate(traces):
        scale = traces[number].block_size if options.block_size is None else options.block_size
        sizes = [size * (512 // scale) for size in options.sizes]
        rows = [judge(trace, size, half=options.half) for size in sizes]
        show(trace, rows)
        if options.plot is not None and not number:
            options.plot.write_text(picture(trace, rows))


def show(trace: BlockTrace, rows: list[Judged]) -> None:
    others = [name for name in EVICTION if name != "lru"]
    asked = sum(map(len, trace.prompts))
    print(f"\n{trace.name}: {len(trace.prompts):,} requests, {asked:,} blocks of {trace.block_size} tokens")
    head = ["blocks", "lru", *others, "optimum", *(f"{name}: gap closed" for name in others), "learned against lru"]
    print("| " + " | ".join(head) + " |\n" + "|" + "---|" * len(head))
    for row in rows:
        shares = [f"{row.share[name]:.2%}" for name in EVICTION]
        gaps = [f"{row.closed(name):.0%}" if row.closed(name) is not None else "-" for name in others]
        cells = [f"{row.blocks:,}", *shares, f"{row.optimum:.2%}", *gaps, f"{row.against_lru('learned'):+.2%}"]
        print("| " + " | ".join(cells) + " |", flush=True)


def picture(trace: BlockTrace, rows: list[Judged]) -> str:
    lines = [Series(name, [(row.blocks, 100 * row.share[name]) for row in rows]) for name in EVICTION]
    lines.append(Series("optimum", [(row.blocks, 100 * row.optimum) for row in rows]))
    below = f"blocks of {trace.block_size} tokens in the cache"
    return chart(f"Prompt blocks found, %, {trace.name}", below, lines, logarithmic=True)


def show_cost(blocks: int) -> None:
    """CPU time of a `BlockPool.take` that evicts, all that it tells others included: the least of some runs."""
    least = dict.fromkeys(EVICTION, float("inf"))
    tick = float("inf")
    for seed in range(REPEATS):
        for name in EVICTION:
            kv = full_of_content(name, blocks, random.Random(seed))
            pool = kv.pool
            while not pool.has_content[pool._next[blocks]]:  # a few are left empty
                pool.take()
            evicted, began = pool.num_free, time.process_time()
            for _ in range(evicted):
                pool.take()
            least[name] = min(least[name], (time.process_time() - began) / evicted)
        policy = full_of_content("learned", blocks, random.Random(seed)).eviction
        assert isinstance(policy, LearnedPolicy)
        began = time.process_time()
        for _ in range(policy._rebuild_every):
            policy._tick()
        tick = min(tick, (time.process_time() - began) / policy._rebuild_every / policy._epoch_blocks)
    told = ", ".join(f"{name} {1e6 * seconds:.2f}" for name, seconds in least.items())
    print(f"{blocks:,} blocks: us per eviction: {told}; learned looks anew at what it knows for {1e6 * tick:.2f} more")


def full_of_content(name: str, blocks: int, source: random.Random) -> KVManager:
    """A pool through which four times its size has gone, with a learned policy in the lead."""
    kv, said = KVManager(blocks, 16, eviction=name), 0
    while said < 4 * blocks:
        count = source.randint(10, 400)
        names = [(said + number).to_bytes(16) for number in range(count)]
        said += count
        request = ReplayedRequest(range(count * 16 + 1), count * 16 + 1, names)
        kv.admit(request, kv.match(request))
        kv.grow(request, count * 16 + 1)
        request.num_computed = count * 16
        kv.publish(request)
        kv.release(request, 0)
        if isinstance(kv.eviction, LearnedPolicy):
            kv.eviction.shadow.leads = False
    return kv


if __name__ == "__main__":
    main()
