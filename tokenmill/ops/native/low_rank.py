"""add_low_rank on the native library."""

from __future__ import annotations

import torch

from tokenmill.ops.native.call import check_float32, run
from tokenmill.ops.native.recording import row_count
from tokenmill.ops.native.structs import MAX_SECTIONS, LowRankArgs, storage_of


def add_low_rank(
    out: torch.Tensor,  # [tokens, out], added to
    x: torch.Tensor,  # [tokens, in]
    adapter: torch.Tensor,  # [tokens] int64: slots, negative without
    down: torch.Tensor,  # [slots, sections * rank, in], perhaps in 16 bits, as `up` then is
    up: torch.Tensor,  # [slots, rank, out], scaled
    ranks: torch.Tensor,  # [slots] int64
    ends: tuple[int, ...],  # of the sections of `out`
) -> torch.Tensor:  # out
    check_float32(out, x)
    if down.dtype != up.dtype or down.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"add_low_rank got factors of {down.dtype} and {up.dtype}")
    if x.stride(1) != 1 or out.stride(1) != 1 or adapter.dtype != torch.int64 or not adapter.is_contiguous():
        raise ValueError("add_low_rank takes dense rows and adjacent slots")
    if len(ends) > MAX_SECTIONS:
        raise ValueError(f"add_low_rank takes {MAX_SECTIONS} sections, not {len(ends)}")
    if not len(x):
        return out
    args = LowRankArgs(
        x=x, out=out, adapter=adapter, down=down, up=up, ranks=ranks, tokens=row_count(x.shape[0]),
        columns=x.shape[1], rows=out.shape[1], rank=up.shape[1], sections=len(ends), x_stride=x.stride(0),
        out_stride=out.stride(0), storage=storage_of(down),
    )  # fmt: skip
    for number, end in enumerate(ends):
        args.ends[number] = end
    run(args)
    return out
