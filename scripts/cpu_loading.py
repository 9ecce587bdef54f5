"""What loading costs by format, for a billion weights, natively and in numpy: `python scripts/cpu_loading.py`."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from tokenmill.model.weights.gguf_blocks import dequantize
from tokenmill.ops.native.formats import OF_GGUF
from tokenmill.ops.native.library import library
from tokenmill.ops.native.matrix import PackedMatrix
from tokenmill.quant.forms import parse_layout
from tokenmill.quant.schemes.packed import Packed

ROWS, COLUMNS = 1408, 2048


def cpu_seconds(call: Callable[[], object], times: int) -> float:
    """Of one thread, so that other programs disturb little; for a billion weights."""
    found = float("inf")
    for _ in range(times):
        begin = time.thread_time()
        call()
        found = min(found, time.thread_time() - begin)
    return found * 1e9 / (ROWS * COLUMNS)


def main() -> None:
    native = library()
    native.threads = 1
    torch.set_num_threads(1)
    random = np.random.default_rng(0)
    copy = torch.ones(ROWS * COLUMNS)
    print(f"copying floats: {cpu_seconds(lambda: copy.clone(), 5):.2f} s")
    for format in OF_GGUF.values():
        raw = random.integers(0, 50, ROWS * COLUMNS // format.values * format.size, dtype=np.uint8)  # finite numbers

        def in_numpy(raw=raw, format=format) -> None:  # type: ignore[no-untyped-def]
            floats = dequantize(raw, format.number, (ROWS, COLUMNS))
            PackedMatrix(ROWS, COLUMNS).append_floats(torch.from_numpy(floats))

        def natively(raw=raw, format=format) -> None:  # type: ignore[no-untyped-def]
            PackedMatrix(ROWS, COLUMNS).append_blocks(raw, format, ROWS)

        old, new = cpu_seconds(in_numpy, 2), cpu_seconds(natively, 5)
        bits = format.form.nbytes(ROWS, COLUMNS) * 8 / (ROWS * COLUMNS)
        print(f"{format.name:8} numpy {old:5.1f} s, native {new:5.2f} s, held as {format.form.name} ({bits:.1f} bits)")
    weight = torch.randn(ROWS, COLUMNS).bfloat16()
    for name in ("int4", "int4-g32-zeros", "int8", "bf16"):
        scheme = Packed(parse_layout(name).default)

        def round_it(scheme=scheme) -> None:  # type: ignore[no-untyped-def]
            scheme.write(scheme.allocate(ROWS, COLUMNS, torch.float32, torch.device("cpu")), 0, weight)

        print(f"bfloat16 rounded to {name}: {cpu_seconds(round_it, 5):.2f} s")


if __name__ == "__main__":
    main()
