"""Native ops that compute every element on its own: gated activations, sums, factors, soft caps."""

from __future__ import annotations

import torch

from tokenmill.ops.native.call import as_rows, check_float32, run
from tokenmill.ops.native.recording import new, row_count
from tokenmill.ops.native.structs import ActArgs, AddArgs, MapArgs

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
_TIMES, _SOFT_CAP = 0, 1


def act_mul(
    x: torch.Tensor,  # [tokens, 2 * inner]: gate, then up
    kind: str,  # "silu" or "gelu_tanh"
) -> torch.Tensor:  # [tokens, inner]
    check_float32(x)
    rows = as_rows(x)
    inner = x.shape[-1] // 2
    out = new((*x.shape[:-1], inner))
    run(ActArgs(
        x=rows, out=out, rows=row_count(rows.shape[0]), inner=inner, x_stride=rows.stride(0), out_stride=inner,
        kind=ACTIVATIONS[kind],
    ))  # fmt: skip
    return out


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # [..., dim] each, of one shape
    check_float32(x, y)
    if x.shape != y.shape:
        raise ValueError(f"a native op got shapes {tuple(x.shape)} and {tuple(y.shape)} to add")
    left, right = as_rows(x), as_rows(y)
    out = new(tuple(x.shape))
    run(AddArgs(
        x=left, y=right, out=out, rows=row_count(left.shape[0]), dim=left.shape[1],
        x_stride=left.stride(0), y_stride=right.stride(0), out_stride=left.shape[1],
    ))  # fmt: skip
    return out


def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:  # [..., dim]
    rows = as_rows(x)
    out = new(tuple(rows.shape))
    _map(rows, out, _TIMES, factor)
    return out.view(x.shape)


def concat(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # [rows, n], [rows, m] -> [rows, n + m]
    out = new((x.shape[0], x.shape[1] + y.shape[1]))
    for part, place in ((x, out[:, : x.shape[1]]), (y, out[:, x.shape[1] :])):
        copy_into(part if part.stride(1) == 1 else part.contiguous(), place)
    return out


def copy_into(x: torch.Tensor, out: torch.Tensor) -> None:  # [rows, dim] each; rows may lie apart
    _map(x, out, _TIMES, 1.0)


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:  # [..., vocab], overwritten where its rows are dense
    rows = as_rows(x)
    if rows.stride(0) < rows.shape[1]:  # rows that share memory would be capped more than once
        rows = rows.contiguous()
    _map(rows, rows, _SOFT_CAP, cap)
    return rows.view(x.shape)


def _map(x: torch.Tensor, out: torch.Tensor, kind: int, value: float) -> None:  # [rows, dim], rows dense
    check_float32(x)
    run(MapArgs(
        x=x, out=out, rows=row_count(x.shape[0]), dim=x.shape[1], x_stride=x.stride(0), out_stride=out.stride(0),
        kind=kind, value=value,
    ))  # fmt: skip
