"""Products of heads with matrices of their own, on the native library."""

from __future__ import annotations

import torch

from tokenmill.ops.native.call import check_float32, run
from tokenmill.ops.native.recording import new, row_count
from tokenmill.ops.native.structs import HeadsArgs


def per_head(
    x: torch.Tensor,  # [tokens, heads, in]
    weight: torch.Tensor,  # [heads, out, in]; transposed: [heads, in, out]
    transposed: bool = False,
    beside: torch.Tensor | None = None,  # [tokens, heads, n]
) -> torch.Tensor:  # [tokens, heads, out], or behind what is beside it [tokens, heads, n + out]
    check_float32(x, weight)
    tokens, heads, columns = x.shape
    x, weight = x if x.stride(2) == 1 else x.contiguous(), weight.contiguous()
    rows, width = weight.shape[2 if transposed else 1], 0 if beside is None else beside.shape[2]
    out = new((tokens, heads, width + rows))
    args = HeadsArgs(
        x=x, weight=weight, out=out, rows=row_count(tokens), heads=heads, rows_of_weight=rows, columns=columns,
        transposed=int(transposed), width_beside=width, x_stride=x.stride(0), x_head=x.stride(1),
        out_stride=out.stride(0), out_head=out.stride(1),
    )  # fmt: skip
    if beside is not None:
        check_float32(beside)
        beside = beside if beside.stride(2) == 1 else beside.contiguous()
        args.beside, args.beside_stride, args.beside_head = beside.data_ptr(), beside.stride(0), beside.stride(1)
    if tokens:
        run(args)
    return out
