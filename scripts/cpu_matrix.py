"""Products of packed matrices against what the machine can read and multiply: `python scripts/cpu_matrix.py 2`."""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable

import numpy as np
import torch

from tokenmill.ops.native.arena import Arena
from tokenmill.ops.native.formats import FORMS, OF_GGUF, PanelForm
from tokenmill.ops.native.library import LEVEL_NAMES, Library, library
from tokenmill.ops.native.matrix import PackedMatrix

READ_ALL, MULTIPLY_BYTES = 4, 5  # src/matrix.h
MACS = {  # of one repeat; AVX-VNNI, AVX-512 and AMX have none of their own
    "baseline": 1, "AVX2": 8 * 32, "AVX-VNNI": 8 * 32, "AVX-512": 8 * 32, "AVX-512 VNNI": 12 * 64, "AMX": 12 * 64,
    "NEON": 12 * 8, "NEON dot product": 12 * 16,
}  # fmt: skip


class CeilingArgs(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_int64),
        ("repeats", ctypes.c_int64),
        ("sink", ctypes.c_void_p),
    )


def best(call: Callable[[], object], clock: Callable[[], float], budget: float) -> float:
    """Seconds of the fastest call."""
    found, until = float("inf"), time.perf_counter() + budget
    call()
    while time.perf_counter() < until:
        begin = clock()
        call()
        found = min(found, clock() - begin)
    return found


def ceilings(native: Library, clock: Callable[[], float]) -> tuple[float, float]:
    """GB/s of reading 96 MiB, and 10^9 multiply-adds of bytes per second, counted as two operations each."""
    memory, sink = Arena(native).take(96 << 20), torch.zeros(64, dtype=torch.int64)
    memory.fill_(1)
    read = CeilingArgs(memory.data_ptr(), len(memory), 1, sink.data_ptr())
    seconds = best(lambda: native.run(READ_ALL, read), clock, 0.5)
    work = CeilingArgs(None, 0, 200_000, sink.data_ptr())
    busy = best(lambda: native.run(MULTIPLY_BYTES, work), clock, 0.5)
    return len(memory) / seconds / 1e9, 2 * MACS[LEVEL_NAMES[native.level]] * work.repeats * native.threads / busy / 1e9


def matrices(form: PanelForm, rows: int, columns: int, total: int, arena: Arena) -> list[PackedMatrix]:
    """As many as make up `total` bytes, so that nothing is read from a cache that a real step would not find there."""
    random = np.random.default_rng(0)
    format = next(format for format in OF_GGUF.values() if format.form == form)
    raw = random.integers(0, 50, rows * columns // format.values * format.size, dtype=np.uint8)  # small, finite numbers
    made = []
    while sum(one.nbytes for one in made) < total:
        one = PackedMatrix(rows, columns, arena)
        one.append_blocks(raw, format, rows)
        made.append(one)
    return made


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("threads", type=int, nargs="?", default=torch.get_num_threads())
    parser.add_argument("--level", type=int, default=None, help="an index into library.LEVEL_NAMES; default: the best")
    parser.add_argument("--rows", type=int, default=3072)
    parser.add_argument("--columns", type=int, default=768)
    parser.add_argument("--forms", default=",".join(form.name for form in FORMS))
    parser.add_argument("--batch", default="1,4,16,64,256")
    parser.add_argument("--budget", type=float, default=0.4, help="seconds per measurement")
    args = parser.parse_args()
    native = library()
    native.threads = args.threads
    if args.level is not None:
        native.level = args.level
    # With one thread, time of the CPU is counted: other programs then do not disturb.
    clock = time.process_time if args.threads == 1 else time.perf_counter
    gbs, gops = ceilings(native, clock)
    print(f"{LEVEL_NAMES[native.level]}, {native.threads} threads: reads {gbs:.1f} GB/s, {gops:.0f} GOP/s of bytes")
    print(f"{args.rows} x {args.columns}" + "".join(f"{f'M={m}':>24}" for m in args.batch.split(",")), flush=True)
    for form in FORMS:
        if form.name not in args.forms.split(","):
            continue
        many = matrices(form, args.rows, args.columns, 96 << 20, Arena(native))
        cells = []
        for m in map(int, args.batch.split(",")):
            x = torch.randn(m, args.columns)
            some = many if m < 16 else many[: max(1, len(many) * 4 // m)]
            seconds = best(lambda: [one.matmul(x) for one in some], clock, args.budget) / len(some)  # noqa: B023
            rate, speed = some[0].nbytes / seconds / 1e9, 2 * m * args.rows * args.columns / seconds / 1e9
            cells.append(f"{rate:8.1f} GB/s {speed:6.0f} GOP")
        print(f"{form.name:10}" + "".join(f"{cell:>24}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
