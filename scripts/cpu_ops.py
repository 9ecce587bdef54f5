"""Times the native CPU ops at the shapes of the default model: microseconds per op, bytes and operations per second.

    python scripts/cpu_ops.py [--threads 2] [--level 1]

Each op is put into a graph once per layer, on caches of its own, so that neither Python nor a warm cache flatters it.
With one thread the CPU's time is taken, not the wall's, since other programs disturb it less.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable

import torch

from tokenmill.ops.native import library, ops
from tokenmill.ops.native.arena import Arena
from tokenmill.ops.native.recording import RecordedGraph
from tokenmill.ops.types import CAUSAL, AttentionBatch

HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB, BLOCK = 576, 1536, 9, 3, 64, 49152, 16
LAYERS = 30
CACHE_BYTES = 600 << 20  # of all layers together; fewer layers where contexts are long


def clock() -> float:
    """With several threads wall time; a thread alone is timed by what it used."""
    return time.process_time() if library.library().threads == 1 else time.perf_counter()


def best_of(call: Callable[[], None], repeats: int = 7) -> float:
    times = []
    for _ in range(repeats):
        begin = clock()
        call()
        times.append(clock() - begin)
    return min(times)


def on_graph(rows: int, times: int, op: Callable[[int], None]) -> float:
    """Seconds per call of `op(layer)`, each on one graph with the others."""
    graph = RecordedGraph(rows)
    with torch.inference_mode(), graph.record():
        for layer in range(times):
            op(layer)
    graph.run(rows)
    return best_of(lambda: graph.run(rows)) / times


class Caches:
    """Paged caches of several layers, and a batch that reads them."""

    def __init__(self, rows: int, context: int, queries: int, dtype: torch.dtype = torch.float32) -> None:
        per_row = -(-context // BLOCK)
        blocks = rows * per_row
        size = blocks * BLOCK * KV_HEADS * DIM * 2 * dtype.itemsize
        self.layers = max(1, min(LAYERS, CACHE_BYTES // size))
        # As in the engine: a block of all layers lies together, in large pages.
        shape = (blocks, self.layers, 2, BLOCK, KV_HEADS, DIM)
        memory = Arena(library.library()).take(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
        self.kv = memory.movedim(0, 2)
        for layer in self.kv:
            layer.copy_(torch.randn(layer.shape))
        self.batch = AttentionBatch(
            rows=torch.arange(rows, dtype=torch.int32),
            q_start=torch.arange(rows + 1, dtype=torch.int32) * queries,
            context=torch.full((rows,), context, dtype=torch.int32),
            block_tables=torch.arange(blocks).view(per_row, rows).t().contiguous().int(),  # rows that grew together
            num_singles=rows if queries == 1 else 0,
            max_query=queries,
            max_context=context,
            host_rows=[],
            host_counts=[],
            host_context=[],
        )
        self.q = torch.randn(rows * queries, HEADS, DIM)
        self.bytes = rows * context * KV_HEADS * DIM * 2 * dtype.itemsize

    def attend(self, layer: int) -> None:
        ops.attention(self.q, self.kv[layer, 0], self.kv[layer, 1], self.batch, CAUSAL, DIM**-0.5)


def read_speed() -> float:
    """Bytes per second of a plain read by all threads: what attention of long contexts can reach."""
    memory = torch.ones(64 << 20)
    return memory.nbytes / best_of(lambda: memory.sum())


def decode_attention(ceiling: float) -> None:
    print(f"\ndecode attention (a plain read makes {ceiling / 1e9:.1f} GB/s)")
    for rows in (1, 16, 64):
        for context in (192, 1024, 8192):
            for dtype in (torch.float32, torch.float16):
                if rows * context > 1 << 18:
                    continue
                caches = Caches(rows, context, 1, dtype)
                seconds = on_graph(rows, caches.layers, caches.attend)
                speed = caches.bytes / seconds / 1e9
                name = str(dtype).removeprefix("torch.")
                print(
                    f"  {rows:3} rows, context {context:5}, {name}: {seconds * 1e6:9.1f} us  {speed:6.1f} GB/s"
                    f"  {speed * 1e9 / ceiling:4.0%}",
                    flush=True,
                )


def chunk_attention() -> None:
    print("\nattention of new tokens, float16")
    for queries, context in ((128, 128), (512, 512), (512, 2048), (512, 8192)):
        caches = Caches(1, context, queries, torch.float16)
        with torch.inference_mode():
            caches.attend(0)
            seconds = best_of(lambda: caches.attend(0), 5)  # noqa: B023
        pairs = queries * context - queries * (queries - 1) // 2
        speed = 4 * pairs * HEADS * DIM / seconds / 1e9
        print(f"  {queries} of {context:5}: {seconds * 1e3:8.2f} ms  {speed:7.1f} GFLOP/s", flush=True)


def elementwise() -> None:
    print("\nelementwise, us per op with its barrier")
    print("  rows   norm  add+norm   rope  act_mul  embed  choose")
    for rows in (1, 16, 64):
        x, residual, fused = torch.randn(rows, HIDDEN), torch.randn(rows, HIDDEN), torch.randn(rows, 2 * INNER)
        qkv = torch.randn(rows, (HEADS + 2 * KV_HEADS) * DIM)
        q, k, v = qkv.split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], dim=1)
        q, k, v = q.view(rows, HEADS, DIM), k.view(rows, KV_HEADS, DIM), v.view(rows, KV_HEADS, DIM)
        weight, angles, logits = torch.randn(HIDDEN), torch.randn(1000, DIM), torch.randn(rows, VOCAB)
        positions, slots = torch.arange(rows), torch.arange(rows) * 5
        cache = torch.zeros(2, rows, BLOCK, KV_HEADS, DIM)
        table, ids = torch.randn(1000, HIDDEN), torch.arange(rows)
        out, on, tokens = (
            torch.zeros(rows, dtype=torch.int64),
            torch.ones(1, dtype=torch.int64),
            torch.zeros(rows, 99).int(),
        )
        calls: list[Callable[[int], object]] = [
            lambda _: ops.rms_norm(x, weight, 1e-5),  # noqa: B023
            lambda _: ops.add_rms_norm(x, residual, weight, 1e-5),  # noqa: B023
            lambda _: ops.rope_kv_write(q, k, v, angles, positions, cache[0], cache[1], slots),  # noqa: B023
            lambda _: ops.act_mul(fused, "silu"),  # noqa: B023
            lambda _: ops.embed(ids, table),  # noqa: B023
            lambda _: ops.choose_into(out, logits, on, ids, ids, tokens),  # noqa: B023
        ]
        times = [on_graph(rows, 100, call) * 1e6 for call in calls]  # type: ignore[arg-type]
        print(f"  {rows:4} " + " ".join(f"{value:7.2f}" for value in times), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--level", type=int, default=None, help="an index into library.LEVEL_NAMES; default: the best")
    given = parser.parse_args()
    native = library.library()
    native.threads = given.threads
    torch.set_num_threads(given.threads)
    if given.level is not None:
        native.level = given.level
    print(f"{library.LEVEL_NAMES[native.level]}, {native.threads} threads")
    elementwise()
    decode_attention(read_speed())
    chunk_attention()


if __name__ == "__main__":
    main()
