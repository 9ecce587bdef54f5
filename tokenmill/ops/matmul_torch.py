"""Products in plain torch: of every kind of weight, on every device; what is quantized is dequantized each time."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tokenmill.ops import invariant
from tokenmill.ops.matmul import ANY_ROWS, MatmulKernel, MatmulNeed, Run
from tokenmill.ops.types import QuantizedRows, Storage
from tokenmill.ops.weight_words import dequantize, rows_of, unpack

FLOAT8 = torch.float8_e4m3fn
LIMITS = {FLOAT8: (-448.0, 448.0), torch.int8: (-128.0, 127.0)}
_EXACT_TERMS = 1024  # so many products of two int8 add up to at most 2^24: float32 knows every integer up to there


def quantize_rows(
    x: torch.Tensor,  # [..., in]
    dtype: torch.dtype = FLOAT8,  # or int8
    fixed: torch.Tensor | None = None,  # [] float32: the scale of every row
) -> QuantizedRows:
    """Each row divided by its own scale, so that its largest magnitude becomes the largest code; or all by one.

    A row with something that is not finite keeps a scale that is not: so are its products, and whoever looks sees it.
    """
    low, high = LIMITS[dtype]
    wide = x.float()
    top = wide.abs().amax(-1)
    if fixed is None:
        scale = torch.where(top == 0, 1.0, top / high)
    else:
        scale = torch.where(top.isfinite(), fixed, top)
    codes = wide / scale[..., None]
    codes = codes.round() if dtype == torch.int8 else codes
    return QuantizedRows(codes.clamp(low, high).to(dtype), scale, x.dtype)


def multiply_dense(x: torch.Tensor | QuantizedRows, storage: Storage, bias: torch.Tensor | None) -> torch.Tensor:
    """A dense weight, multiplied in its own dtype."""
    assert isinstance(x, torch.Tensor)
    weight = storage["weight"]
    if x.dtype == weight.dtype:
        return F.linear(x, weight, bias)
    return F.linear(x.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype)).to(x.dtype)


def _invariant(x: torch.Tensor | QuantizedRows, storage: Storage, bias: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(x, torch.Tensor)
    return invariant.linear(x, storage["weight"], bias)


def _words(need: MatmulNeed) -> Run:
    kind = {"grouped fp8": "fp8"}.get(need.weight, need.weight)

    def run(x: torch.Tensor | QuantizedRows, storage: Storage, bias: torch.Tensor | None) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        zeros = rows_of(storage["zeros"]) if need.zeros else None
        codes = unpack(rows_of(storage["weight"]), kind)
        return F.linear(x, dequantize(codes, rows_of(storage["scale"]), zeros, x.dtype), bias)

    return run


def multiply_float8(x: torch.Tensor | QuantizedRows, storage: Storage, bias: torch.Tensor | None) -> torch.Tensor:
    wide = x.widen() if isinstance(x, QuantizedRows) else x
    return F.linear(wide, dequantize(storage["weight"], storage["scale"][:, None], None, wide.dtype), bias)


def multiply_int8(x: torch.Tensor | QuantizedRows, storage: Storage, bias: torch.Tensor | None) -> torch.Tensor:
    """In pieces that float32 adds up exactly: on CPUs its products are the fastest that torch has for sure."""
    assert isinstance(x, QuantizedRows)
    weight, scale = storage["weight"], storage["scale"]
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    total = torch.zeros(*x.shape[:-1], weight.shape[0], dtype=torch.int32, device=weight.device)
    for left, right in zip(*(torch.split(codes, _EXACT_TERMS, -1) for codes in (x.values, weight))):
        total += (left.float() @ right.float().T).int()
    out = total.to(wide) * scale * x.scale[..., None]
    return (out if bias is None else out + bias).to(x.dtype)


KERNELS = (
    MatmulKernel("the matrix library", ("dense",), lambda need: multiply_dense, fastest=lambda need: (ANY_ROWS,)),
    MatmulKernel(
        "batch-invariant torch",
        ("dense",),
        lambda need: _invariant,
        devices=("cpu",),
        batch_invariant=True,
        rank=-1,  # slower: only for who asks for it
    ),
    MatmulKernel("dequantized by torch", ("int4", "int8", "grouped fp8"), _words),
    MatmulKernel(
        "dequantized by torch",
        ("fp8",),
        lambda need: multiply_float8,
        shape_misfit=lambda need: "rounds no inputs" if need.static_inputs else "",
    ),
    MatmulKernel(
        "dequantized by torch, inputs rounded",
        ("fp8",),
        lambda need: multiply_float8,
        shape_misfit=lambda need: "" if need.static_inputs else "rounds inputs to a scale of the checkpoint",
        inputs=FLOAT8,
        quantize=quantize_rows,
    ),
    MatmulKernel(
        "exact sums in torch",
        ("w8a8",),
        lambda need: multiply_int8,
        inputs=torch.int8,
        quantize=quantize_rows,
        batch_invariant=True,
    ),
)
