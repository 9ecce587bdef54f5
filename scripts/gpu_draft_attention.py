"""Decode attention of rows with several queries each, as steps with drafts have them: what launch shapes are worth.

    python scripts/gpu_draft_attention.py --heads 9 3 64 --rows 1 8 32 --queries 1 2 3 5 17 --contexts 300 1500

Microseconds of one layer's call in a recorded chain of 24, each over keys of its own; the first column is the rule's.
"""

from __future__ import annotations

import argparse
import itertools

import torch

from tokenmill.ops.triton import config
from tokenmill.ops.triton.attention import decode
from tokenmill.ops.triton.config import Tile
from tokenmill.ops.types import CAUSAL, AttentionBatch

LAYERS, BLOCK, REPLAYS = 24, 16, 40
LEAST_KEYS = (64, 128, 256, 512, 1024)


def batch_of(rows: int, queries: int, context: int, device: torch.device) -> AttentionBatch:
    per_row = -(-(context + queries) // BLOCK)
    n = rows * queries
    entry = torch.arange(n, device=device, dtype=torch.int32)
    return AttentionBatch(
        rows=entry // queries,
        q_start=torch.arange(n + 1, device=device, dtype=torch.int32),
        context=context + 1 + entry % queries,
        block_tables=torch.randperm(rows * per_row, device=device).int().view(rows, per_row),
        num_singles=n, max_query=1, max_context=context + queries, host_rows=[0] * n, host_counts=[1] * n,
        host_context=[context + queries] * n, queries=queries,
    )  # fmt: skip


def microseconds(rows: int, queries: int, context: int, heads: tuple[int, int, int]) -> float:
    device = torch.device("cuda")
    batch = batch_of(rows, queries, context, device)
    q_heads, kv_heads, dim = heads
    blocks = int(batch.block_tables.max()) + 1
    kv = torch.randn(LAYERS, 2, blocks, BLOCK, kv_heads, dim, device=device, dtype=torch.bfloat16)
    q = torch.randn(rows * queries, q_heads, dim, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(q)

    def layers() -> None:
        batch.cache.clear()
        for k, v in kv:
            decode.decode_attention(q, k, v, out, batch, CAUSAL, dim**-0.5)

    layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers()
    times = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / REPLAYS / LAYERS)
    return sorted(times)[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, nargs=3, default=[9, 3, 64], help="queries', keys', and their width")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 2, 3, 5, 17])
    parser.add_argument("--contexts", type=int, nargs="+", default=[300, 1500])
    parser.add_argument("--tiles", action="store_true", help="other tiles, too")
    arguments = parser.parse_args()
    heads = tuple(arguments.heads)
    splits, tile_of = config.decode_splits, config.decode_tile
    print(f"{'rows':>4} {'queries':>7} {'keys':>5} {'rule':>6} " + " ".join(f"{one:>6}" for one in LEAST_KEYS))
    for context, rows, queries in itertools.product(arguments.contexts, arguments.rows, arguments.queries):
        decode.decode_splits, decode.decode_tile = splits, tile_of
        found = [microseconds(rows, queries, context, heads)]
        for least in LEAST_KEYS:
            decode.decode_splits = lambda *a, least=least: (splits(*a)[0], max(1, least // a[4].block_n))
            found.append(microseconds(rows, queries, context, heads))
        line = f"{rows:4d} {queries:7d} {context:5d} " + " ".join(f"{one:6.2f}" for one in found)
        if arguments.tiles:
            decode.decode_splits = splits
            own = tile_of(heads[0] // heads[1] * queries, heads[2], heads[2], torch.bfloat16, rows * heads[1], None)
            for width, warps, stages in ((32, 2, 5), (64, 4, 5), (64, 1, 4), (128, 4, 3), (128, 8, 3)):
                tile = Tile(own.block_m, width, warps, stages)
                decode.decode_tile = lambda *a, tile=tile: tile
                line += f"  {width}/{warps}: {microseconds(rows, queries, context, heads):.2f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
